"""Chat: what a conversation says, for chat, responses and messages.

- messages.py reads the messages of a chat; the plug-ins of the other APIs read theirs.
- contents.py reads what a message contains, and foreign.py the text in content that templates have no place for.
- history.py puts calls and results in order; call_arguments.py repairs the calls' arguments.
- tools.py has the tools, in the form in which the model sees them, and the choice among them.
- template_gaps.py writes as text what the chat template cannot show.
- constraints.py reads the clients' constraints; answer_grammar.py joins them with the tools.
- conversation.py holds tools and reasoning of a request; answer_reader.py reads the answers of its model.
"""
