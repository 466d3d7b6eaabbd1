r"""Parsers of the text of an answer: its reasoning, its tool calls, and its content.

They accept text in any pieces, and know nothing of tokens, requests or HTTP.

How a call is read
------------------
A Qwen model answers "Sure." and then calls a tool. Its text arrives in pieces that end anywhere:

>>> from oaiserve.routes.dialects.hermes import HERMES
>>> parser = HERMES.parser({"get_time": {}})
>>> parser.push('Sure. <tool')
[Content(text='Sure. ')]
>>> parser.push('_call>\n{"name": "get_time", "argum')
[]
>>> parser.push('ents": {"zone": "u')
[CallBegin(name='get_time'), Arguments(text='{"zone": "u')]
>>> parser.push('tc"}}\n</tool_call>')
[Arguments(text='tc"}'), CallEnd()]

1. In text, `CallParser` (calls.py) searches for the opening tags of its class. What cannot begin a tag any more is
   `Content` (segments.py). So "<tool" waits for the next piece.
2. After a tag comes the head: everything up to the arguments. The method `_head` of a parser for one notation reads it:
   json_calls.py for objects, tagged_calls.py for a tag around each argument, untagged_calls.py for objects without a
   tag. `CallBegin` follows if the request has a tool of this name. Otherwise the head was no call, and is content.
3. The arguments become JSON, whatever the notation. Objects are passed on as they arrive. A value between tags is read
   as a whole, because its type decides whether it needs quotes.
4. After the arguments, the closing tags are dropped, and the search starts again. A call that breaks off ends with
   `CallBroken` and its text, so that an answer in one piece can show it as content.

A `CallFamily` (family.py) has such a parser, and what the other direction needs: the text of calls in a history, and a
grammar for calls that must be made. Its `form` (tagged_form.py) describes calls with tags, for both directions. Its
`sites` (sites.py) are the positions where the name of a tool occurs, each found by its `lead`, the text before it: from
there on, the calls of strict tools obey their schemas.

Families come from plug-ins, and those that ship are files of oaiserve/plugins/dialects, where adding one is enough.
Hermes (hermes.py) is here, because it stands in for families that are not known. dialect.py chooses the family and the
reasoning (reasoning.py) of a server's model. channels.py is for answers in channels, raw_call.py reads the input of a
custom tool, and lark.py writes texts in grammars.
"""
