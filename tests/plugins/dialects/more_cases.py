"""What models of the rows in json_rows, tagged_rows and headed_calls write, with the content and calls in it.

`book` and `get-time` are the tools of test_table.
"""

from typing import Any

Arguments = dict[str, Any]
ROME: Arguments = {"city": "Rome"}
NS = "]<]minimax[>["
# Each: the dialect, what the model writes, the content and the calls.
BOOK_CASES: list[tuple[str, str, str, list[tuple[str, Arguments]]]] = [
    ("nemotron_json", 'One room.\n<TOOLCALL>[{"name": "book", "arguments": {"city": "Rome"}}, {"name": "get-time", '
     '"arguments": {}}]</TOOLCALL>\n', "One room.\n", [("book", ROME), ("get-time", {})]),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", "<TOOLCALL>[]</TOOLCALL>", []),
    ("cohere", '<|START_ACTION|>[\n    {"tool_call_id": "7", "tool_name": "book", "parameters": {"city": "Rome"}},\n'
     '    {"tool_name": "get-time", "tool_call_id": "8", "parameters": {}}\n]<|END_ACTION|>', "",
     [("book", ROME), ("get-time", {})]),
    ("cohere", "<|START_RESPONSE|>No room is free.<|END_RESPONSE|>", "No room is free.", []),
    ("cohere", "<|START_TEXT|>None.<|END_TEXT|>", "None.", []),
    ("cohere", '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "swim"}]',
     '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "swim"}]', []),
    ("command_r", 'I reserve it.\nAction: ```json\n[\n    {\n        "tool_name": "book",\n        "parameters": {\n'
     '            "city": "Rome"\n        }\n    }\n]```', "I reserve it.\n", [("book", ROME)]),
    ("command_r", 'Action:```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```',
     'Action:```json\n[{"tool_name": "directly-answer", "parameters": {}}]\n```', []),
    ("apriel", '<tool_calls>[{"name": "book", "arguments": {"city": "Rome"}, "id": "3"}]</tool_calls>', "",
     [("book", ROME)]),
    ("apriel", '[BEGIN FINAL RESPONSE]\nIn <tool_calls>.\n[END FINAL RESPONSE]', "\nIn <tool_calls>.\n", []),
    ("minimax", '<tool_calls>\n{"name": "book", "arguments": {"city": "Rome"}}\n{"name": "get-time", "arguments": {}}\n'
     "</tool_calls>", "", [("book", ROME), ("get-time", {})]),
    ("apertus", 'I book. <|tools_prefix|>[{"book": {"city": "Rome"}}, {"get-time": {}}]<|tools_suffix|>', "I book. ",
     [("book", ROME), ("get-time", {})]),
    ("apertus", '<|tools_prefix|>[{"book": 3}]<|tools_suffix|>', '<|tools_prefix|>[{"book": 3}]<|tools_suffix|>', []),
    ("firefunction", ' functools[{"name": "book", "arguments": {"city": "Rome"}}, {"name": "get-time"}]', "",
     [("book", ROME), ("get-time", {})]),
    ("firefunction", "from functools import cache", "from functools import cache", []),
    ("functionary_v31", 'Gladly. <function=book>{"city": "Rome"}</function><function=get-time>{}</function>',
     "Gladly. ", [("book", ROME), ("get-time", {})]),
    ("functionary_v31", "<function=book>city</function>", "<function=book>city</function>", []),
    ("functionary_v32", 'all\nI book it.\n>>>book\n{"city": "Rome"}>>>get-time\n{}', "I book it.\n",
     [("book", ROME), ("get-time", {})]),
    ("functionary_v32", 'get-time\n{}>>>all\nIt is noon.', "It is noon.", [("get-time", {})]),
    ("functionary_v32", "bookshops are open\n>>>books\n{}", "bookshops are open\n>>>books\n{}", []),
    ("gigachat3", 'I book.<|function_call|>{"name": "book", "arguments": {"city": "Rome"}}', "I book.",
     [("book", ROME)]),
    ("gigachat3", 'I book.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get-time", "arguments": {}}',
     "I book.", [("get-time", {})]),
    ("solar_open", '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>book<|tool_call:args|>{"city": "Rome"}'
     "<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>get-time<|tool_call:args|>{}<|tool_call:end|>"
     "<|calls|>", "", [("book", ROME), ("get-time", {})]),
    ("solar_open", "<|content|>All full.<|end|>", "All full.", []),
    ("hunyuan", "Booking.<tool_calls>\n<tool_call>book<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome"
     "</arg_value>\n<arg_key>nights</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>get-time<tool_sep>\n</tool_call>\n"
     "</tool_calls>", "Booking.", [("book", {"city": "Rome", "nights": 2}), ("get-time", {})]),
    ("minicpm5", '<function name="book"><param name="city">Rome</param><param name="nights">2</param></function>\n'
     '<function name="get-time"></function>', "", [("book", {"city": "Rome", "nights": 2}), ("get-time", {})]),
    ("minicpm5", '<function name="book"><param name="city"><![CDATA[a </param> & ]] b]]></param><param name="more">'
     '<![CDATA[{"x": "</param>"}]]></param></function>', "",
     [("book", {"city": "a </param> & ]] b", "more": {"x": "</param>"}})]),
    ("glm45", '<tool_call>book{"city": "Rome"}</tool_call>', "", [("book", ROME)]),
    ("minicpm5", '<function name="book">{"city": "Rome"}</function> Done.', " Done.", [("book", ROME)]),
    ("kimi_k3", '<|open|>response<|sep|>I book <|sep|>.<|close|>response<|sep|><|open|>tools<|sep|>'
     '<|open|>call tool="book" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument'
     '<|sep|><|open|>argument key="nights" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|><|open|>'
     'call tool="get-time" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
     "I book <|sep|>.", [("book", {"city": "Rome", "nights": 2}), ("get-time", {})]),
    ("minimax_m3", f'</mm:think>I book.{NS}<tool_call>\n{NS}<invoke name="book">{NS}<city>Rome{NS}</city>{NS}'
     f"<guests>{NS}<item>Ada{NS}</item>{NS}<item>7{NS}</item>{NS}</guests>{NS}<more>{NS}<at>{NS}<item>1{NS}</item>{NS}</at>{NS}<on>"
     f'true{NS}</on>{NS}</more>{NS}</invoke>\n{NS}<invoke name="get-time">{NS}</invoke>\n{NS}</tool_call>', "I book.",
     [("book", {**ROME, "guests": ["Ada", "7"], "more": {"at": [1], "on": True}}), ("get-time", {})]),
    ("minimax_m3", f'{NS}<invoke name="book">{NS}<note>{NS}<a>b{NS}</a>{NS}</note>{NS}<more>{NS}<a>b{NS}</more>{NS}'
     "</invoke>", "", [("book", {"note": f"{NS}<a>b{NS}</a>", "more": f"{NS}<a>b"})]),
    ("muse", ' to=book<|message|><atem:function_calls>\n<atem:invoke name="book">\n<atem:parameter name="city">Rome'
     "</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|><|start|>assistant to=get-time<|message|>"
     '<atem:function_calls>\n<atem:invoke name="get-time">\n</atem:invoke>\n</atem:function_calls><|eot|>', "",
     [("book", ROME), ("get-time", {})]),
    ("muse", ' to=user<|message|>Write <atem:invoke name="get-time">\n</atem:invoke> to=it.<|eot|>',
     'Write <atem:invoke name="get-time">\n</atem:invoke> to=it.', []),
]  # fmt: skip
