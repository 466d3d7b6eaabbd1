"""Bodies of any size for the growth test: for each route, the forms that cost servers like this one most.

A form is a text in which the parts in «» are repeated as often as the size needs, all of them equally often. There,
`#` becomes the number of the repetition, `##` the next number, and a list's last comma is dropped. So "«[»«]»" is
nested, and "[«1,»]" is a long list.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tools.attack.attack import CHAT, COMPLETIONS

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
CONVERSATIONS = "/v1/conversations"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
COMPACT = f"{RESPONSES}/compact"
CONVERSATION = f"{CONVERSATIONS}/{{conversation_id}}"
EMBEDDINGS = "/v1/embeddings"
EMBED = "/v2/embed"
FEATURES = "/embed"
OF_TOKENS = ("/embed_sparse", "/embed_all")
TOKENIZE = "/tokenize"
DETOKENIZE = "/detokenize"
FILES = "/v1/files"
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
BATCHES = "/v1/batches"
MESSAGE_BATCHES = f"{MESSAGES}/batches"
OLLAMA_CHAT = "/api/chat"
OLLAMA_GENERATE = "/api/generate"
OLLAMA_EMBED = "/api/embed"
OLLAMA_EMBED_ONE = "/api/embeddings"
OLLAMA_NAMED = tuple(f"/api/{name}" for name in ("show", "pull", "create", "copy", "push"))
SCORES = ("/score", "/v1/score")
RERANKS = ("/rerank", "/v1/rerank", "/v2/rerank")
BARE = (
    f"{RESPONSES}/{{response_id}}/cancel",
    f"{BATCHES}/{{batch_id}}/cancel",
    f"{MESSAGE_BATCHES}/{{batch_id}}/cancel",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    *SCORES[1:],
    *RERANKS[1:],
    *OLLAMA_NAMED,
)  # fmt: skip  without forms of their own
BOUNDARY = "growing"
MULTIPART = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}

Forms = Mapping[str, str]  # keyed by name


class Form(NamedTuple):
    """A body of any size for a route."""

    path: str
    name: str
    text: str
    headers: Mapping[str, str] = {}

    def body(self, num_bytes: int) -> bytes:
        body = grown(self.text, num_bytes).encode()
        return gzip.compress(body, 1) if self.headers.get("content-encoding") == "gzip" else body


def grown(text: str, num_bytes: int) -> str:
    """Return the text with its parts in «» repeated, so that they have about `num_bytes` together."""
    units = re.findall("«(.*?)»", text, re.DOTALL)
    digits = len(str(num_bytes)) - 2
    number = num_bytes // sum(len(unit.encode()) + digits * unit.count("#") for unit in units)

    def repeated(found: re.Match[str]) -> str:
        unit = found[1]
        numbered = (unit.replace("##", str(each + 1)).replace("#", str(each)) for each in range(number))
        whole = "".join(numbered) if "#" in unit else unit * number
        return whole.removesuffix(",") if found[2] in ("]", "}", ",", "") else whole

    return re.sub("«(.*?)»(?=(.?))", repeated, text, flags=re.DOTALL)


def within(template: str, forms: Forms) -> Forms:
    return {name: template.replace("HERE", form) for name, form in forms.items()}


# -- any route with a body in JSON ------------------------------------------------------------------------------------

ANY = {
    "deep lists": '{"user":«[»1«]»}',
    "deep objects": '{"user":«{"a":»1«}»}',
    "unknown names": '{«"u#":1,»}',
    "one name again": '{«"user":"a",»}',
    "white space": "{« »}",
    "a long name": '{"«a»":1}',
    "a name of escapes": r'{"«\u0041»":1}',
    "numbers": '{"user":[«1e5,»]}',
    "a long number": '{"seed":1«0»}',
    "objects": '{"user":[«{"a":{}},»]}',
    "no JSON": "«x»",
    "unended": '{"user":[«"a",»',
}  # fmt: skip

# -- texts, within a string of JSON -----------------------------------------------------------------------------------

TEXTS = {
    "one letter": "«a»", "words": "«word »", "spaces": "« »", "line ends": r"«\n»", "escapes": r"«\u0041»",
    "emoji": "«😀»", "backslashes": r"«\\»", "quotes": r"«\"»", "digits": "«1»", "NULs": r"«\u0000»",
    "combining marks": r"a«\u0301»", "control tokens": "«<|im_start|>»", "cut control tokens": "«<|im_»",
    "tags of reasoning": "«<think>»", "tags of calls": "«<tool_call>{»", "marks of a stream": "«: tokens »",
    "dashes": "«-»", "brackets": "«[{(»", "full width": "«\uff1c\uff5c»", "letters and spaces": "«a »",
    "base64": "data:image/png;base64,«AAAA»",
}  # fmt: skip

# -- histories --------------------------------------------------------------------------------------------------------

USER = '{"role":"user","content":"a"},'
ASSISTANT = '{"role":"assistant","content":"b"},'
CALL = '{"id":"c#","type":"function","function":{"name":"f","arguments":"{}"}},'
CALLING = '{"role":"assistant","tool_calls":[HERE]},'
RESULT = '{"role":"tool","tool_call_id":"c#","content":"r"},'
ONE_CALL = CALLING.replace("HERE", CALL[:-1])
CHAT_HISTORIES = {
    "messages of one letter": f"«{USER}»",
    "turns of one letter": f"«{USER}{ASSISTANT}»",
    "messages of the system": '«{"role":"system","content":"a"},»',
    "empty messages": '«{"role":"assistant"},»',
    "a call and its result, again": f"«{ONE_CALL}{RESULT}»",
    "calls, then their results": CALLING.replace("HERE", f"«{CALL}»") + f"«{RESULT}»",
    "calls of one id": f"«{ONE_CALL}{RESULT}»".replace("#", ""),
    "calls without results": CALLING.replace("HERE", f"«{CALL}»") + USER[:-1],
    "results without calls": f"«{RESULT}»",
    "broken calls": CALLING.replace("HERE", '«{"function":{"arguments":"{"}},»') + USER[:-1],
    "parts of one letter": '{"role":"user","content":[«{"type":"text","text":"a"},»]}',
    "parts of other types": '{"role":"user","content":[«{"type":"f#","text":"a"},»]},' + ASSISTANT + USER[:-1],
    "a message's other fields": '{"role":"user","content":"a",«"f#":1,»}',
    "deep arguments": ONE_CALL.replace("{}", r"«{\"a\":»1«}»") + USER[:-1],
    "unended arguments": ONE_CALL.replace("{}", r"«{\"a\":»") + USER[:-1],
    "arguments of quotes": ONE_CALL.replace("{}", r"{«'a\":»") + USER[:-1],
}  # fmt: skip
ITEM_CALL = '{"type":"function_call","call_id":"c#","name":"f","arguments":"{}"},'
ITEM_RESULT = '{"type":"function_call_output","call_id":"c#","output":"r"},'
ITEMS = {
    "messages of one letter": f"«{USER}»",
    "turns of one letter": f"«{USER}{ASSISTANT}»",
    "a call and its result, again": f"«{ITEM_CALL}{ITEM_RESULT}»",
    "calls, then their results": f"«{ITEM_CALL}»,«{ITEM_RESULT}»",
    "calls of one id": f"«{ITEM_CALL}{ITEM_RESULT}»".replace("#", ""),
    "calls without results": f"«{ITEM_CALL}»",
    "results without calls": f"«{ITEM_RESULT}»",
    "thoughts": '«{"type":"reasoning","id":"rs_#","summary":[{"type":"summary_text","text":"a"}]},»',
    "references": '«{"type":"item_reference","id":"msg_#"},»',
    "calls of hosted tools": '«{"type":"web_search_call","id":"w#","action":{"query":"a"}},»',
    "other items": '«{"type":"kind_#","text":"a"},»',
    "parts of one letter": '{"role":"user","content":[«{"type":"input_text","text":"a"},»]}',
}  # fmt: skip
BLOCK_CALL = '{"type":"tool_use","id":"c#","name":"f","input":{}},'
BLOCK_RESULT = '{"type":"tool_result","tool_use_id":"c#","content":"r"},'
ASKS = '{"role":"user","content":[HERE]}'
SAYS = '{"role":"assistant","content":[HERE]}'
CALLS_BLOCK = SAYS.replace("HERE", BLOCK_CALL[:-1])
TAKES_BLOCK = ASKS.replace("HERE", BLOCK_RESULT[:-1])
TURNS = {
    "messages of one letter": f"«{USER}»",
    "turns of one letter": f"«{USER}{ASSISTANT}»",
    "messages of the system": f'«{USER}{{"role":"system","content":"a","clear_at":"next_user_message"}},»',
    "a call and its result, again": f"«{CALLS_BLOCK},{TAKES_BLOCK},»",
    "calls, then their results": f"{SAYS},{ASKS}".replace("HERE", f"«{BLOCK_CALL}»", 1).replace(
        "HERE", f"«{BLOCK_RESULT}»"
    ),
    "calls of one id": f"«{CALLS_BLOCK},{TAKES_BLOCK},»".replace("#", ""),
    "calls without results": SAYS.replace("HERE", f"«{BLOCK_CALL}»") + "," + USER[:-1],
    "results without calls": ASKS.replace("HERE", f"«{BLOCK_RESULT}»"),
    "blocks of one letter": ASKS.replace("HERE", '«{"type":"text","text":"a"},»'),
    "other blocks": SAYS.replace("HERE", '«{"type":"kind_#","text":"a"},»') + "," + USER[:-1],
    "thoughts": SAYS.replace("HERE", '«{"type":"thinking","thinking":"a","signature":"s"},»') + "," + USER[:-1],
    "added tools": f'{USER}{{"role":"system","content":[«{{"type":"tool_addition","tool":{{"name":"t#","definition":'
    '{"name":"t#","input_schema":{}}}},»]}',
}  # fmt: skip

# -- tools, schemas and other constraints -----------------------------------------------------------------------------

SCHEMAS = {
    "properties": '{"type":"object","properties":{«"p#":{"type":"string"},»}}',
    "required properties": '{"type":"object","required":[«"p#",»],"properties":{«"p#":{"type":"string"},»}}',
    "a long name": '{"type":"object","properties":{"«a»":{}}}',
    "deep objects": '«{"type":"object","properties":{"a":»{"type":"string"}«}}»',
    "deep lists": '«{"type":"array","items":»{"type":"string"}«}»',
    "deep unions": '«{"anyOf":[{"type":"null"},»{"type":"string"}«]}»',
    "a union": '{"anyOf":[«{"const":"v#"},»]}',
    "a union of objects": '{"anyOf":[«{"type":"object","properties":{"p#":{"type":"string"}},"required":["p#"]},»]}',
    "oneOf": '{"oneOf":[«{"const":"v#"},»]}',
    "oneOf of objects": '{"oneOf":[«{"type":"object","properties":{"p#":{"const":1},"q#":{"const":#}}},»]}',
    "allOf": '{"allOf":[«{"properties":{"p#":{"type":"string"}}},»]}',
    "unions in allOf": '{"allOf":[«{"anyOf":[{"const":1},{"const":#}]},»]}',
    "an enum": '{"enum":[«"v#",»]}',
    "an enum of one value": '{"enum":[«"v",»]}',
    "an enum of numbers": '{"enum":[«#,»]}',
    "an enum of large numbers": '{"enum":[«9007199254740993#,»]}',
    "a long constant": '{"const":"«a»"}',
    "a constant of lists": '{"const":[«[],»]}',
    "types": '{"type":[«"string",»]}',
    "a chain of references": '{"$ref":"#/$defs/d0","$defs":{«"d#":{"items":{"$ref":"\\u0023/$defs/d##"}},»}}',
    "references to one": '{"$defs":{"d":{"enum":["a"]}},"properties":{«"p#":{"$ref":"\\u0023/$defs/d"},»}}',
    "references to the root": '{"properties":{«"p#":{"$ref":"\\u0023"},»}}',
    "unused definitions": '{"type":"string","$defs":{«"d#":{"type":"string"},»}}',
    "a long reference": '{"$ref":"\\u0023«/a»"}',
    "a reference of escapes": '{"$ref":"\\u0023/$defs/«~1»","$defs":{}}',
    "anchors after a long URI": '{"$ref":"#/$defs/d0","$id":"urn:«a»","$defs":{«"d#":{"$anchor":"x#"},»}}',
    "references after a long URI": '{"$id":"a:/«a/»","properties":{«"p#":{"$ref":"b\\u0023c"},»}}',
    "negated texts": '{"type":"object","properties":{«"p#":{"not":{"const":"v#"}},»}}',
    "dependencies": '{"type":"object","dependentRequired":{«"p#":["q#"],»}}',
    "conditions": '{"properties":{«"p#":{"if":{"minimum":#},"then":{"maximum":9},"else":{"minimum":1}},»}}',
    "a long pattern": '{"type":"string","pattern":"^«a»$"}',
    "a pattern of alternatives": '{"type":"string","pattern":"^(«a#|»b)$"}',
    "patterns": '{"properties":{«"p#":{"type":"string","pattern":"^[a-z]{#}$"},»}}',
    "patterns of names": '{"type":"object","patternProperties":{«"^p#":{},»}}',
    "names that match patterns": '{"patternProperties":{"^p":{"minLength":1}},"properties":{«"p#":{},»}}',
    "a costly match": '{"patternProperties":{"^(a|a)*$":{}},"properties":{"«a»b":{}}}',
    "a long description": '{"type":"string","description":"«a»"}',
    "unknown keywords": '{"type":"string",«"x#":1,»}',
    "examples": '{"type":"string","examples":[«{"a":1},»]}',
    "tuples": '{"type":"array","prefixItems":[«{"type":"string"},»]}',
}  # fmt: skip
REGEXES = {
    "letters": "«a»", "alternatives": "«a#|»b", "optional letters": "«a?»", "groups": "«(»a«)»", "stars": "«(»a«)*»",
    "classes": "«[a-z]»", "one class": "[«a-z»]", "repeats": "«a{9}»", "a repeat": "a«{9}»", "any": "«.*»",
    "escapes": r"«\\d»", "a long repeat": "a{1«0»}", "properties": r"«\\p{L}»", "names": "«(?P<n#>a)»",
}  # fmt: skip
LARK = {
    "rules": r"start: r0\n«r#: \"a\" | r#\n»",
    "alternatives": r"start: «\"a#\" | »\"b\"",
    "a sequence": r"start: «\"a\" »",
    "groups": r"start: «(»\"a\"«)»",
    "optional": r"start: «\"a\"? »",
    "a long text": r"start: \"«a»\"",
    "a comment": r"start: \"a\"\n// «a»",
    "white space": r"start: \"a\"«\n»",
    "terminals": r"start: T0\n«T#: \"a#\"\n»",
    "regexes": r"start: «/a#+/ »",
}
GBNF = {
    "rules": r"root ::= \"a\"\n«r# ::= \"a\"\n»",
    "alternatives": r"root ::= «\"a#\" | »\"b\"",
    "groups": r"root ::= «(»\"a\"«)»",
    "a class": "root ::= [«a-z»]",
    "repeats": r"root ::= «\"a\"{9} »",
    "a comment": r"root ::= \"a\"\n# «a»",
}
CHOICES = {"choices": '«"c#",»', "one choice": '"«a»"', "equal choices": '«"c",»', "prefixes": '«"a","aa",»'}
FUNCTION = '{"type":"function","function":{"name":"f#","parameters":HERE}},'
CHAT_TOOLS = {
    "tools": f"«{FUNCTION.replace('HERE', '{}')}»",
    "tools of one name": f"«{FUNCTION.replace('HERE', '{}').replace('#', '')}»",
    "a tool's long name": '{"type":"function","function":{"name":"«a»"}}',
    "a tool's long description": '{"type":"function","function":{"name":"a","description":"«a»"}}',
    **within(FUNCTION[:-1].replace("#", ""), {f"a tool: {name}": form for name, form in SCHEMAS.items()}),
}
FLAT_TOOLS = {  # tools in requests for responses
    "tools": '«{"type":"function","name":"f#","parameters":{}},»',
    "hosted tools": '«{"type":"mcp","server_label":"s#"},»',
    **within(
        '{"type":"function","name":"f","parameters":HERE}', {f"a tool: {name}": SCHEMAS[name] for name in SCHEMAS}
    ),
}
CLAUDE_TOOLS = {
    "tools": '«{"name":"f#","input_schema":{}},»',
    **within('{"name":"f","input_schema":HERE}', {f"a tool: {name}": SCHEMAS[name] for name in SCHEMAS}),
}
SAMPLING = {
    "stop": '"stop":[«"s#",»]', "a long stop": '"stop":"«a»"', "logit_bias": '"logit_bias":{«"#":1,»}',
    "a long id": '"logit_bias":{"1«0»":1}',
    "bad_words": '"bad_words":[«"w#",»]', "a long bad word": '"bad_words":["«a»"]',
    "allowed_token_ids": '"allowed_token_ids":[«7,»]', "stop_token_ids": '"stop_token_ids":[«7,»]',
    "stream_options": '"stream":true,"stream_options":{«"o#":true,»}', "metadata": '"metadata":{«"m#":"a",»}',
    "user": '"user":"«: tokens »"', "cache_salt": '"cache_salt":"«a»"', "model": '"model":"«m»"',
    "template's variables": '"chat_template_kwargs":{«"v#":1,»}',
}  # fmt: skip
PROMPTS = {
    "a text": '"«a»"', "empty texts": '[«"",»]', "texts of one letter": '[«"a",»]', "ids": "[«7,»]",
    "lists of one id": "[«[7],»]", "empty lists": "[«[],»]", "long ids": "[«123456789012,»]", "floats": "[«1.0,»]",
    "objects": "[«{},»]", "a list of ids": "[[«7,»]]", "texts and ids": '[«"a",7,»]',
}  # fmt: skip


def _constraints(schema: str, others: str | None = None) -> Forms:
    """Return constraints on the answer: schemas in their place, and others in one of vLLM's."""
    fields = {f"schema: {name}": schema.replace("HERE", form) for name, form in SCHEMAS.items()}
    kinds = {
        "regex": (REGEXES, '"HERE"'),
        "grammar": (LARK, '"HERE"'),
        "GBNF": (GBNF, '"HERE"'),
        "choice": (CHOICES, "[HERE]"),
    }
    for kind, (forms, place) in kinds.items() if others else ():
        field = f'"structured_outputs":{{"{kind.replace("GBNF", "grammar")}":{place}}}'
        fields |= {f"{kind}: {name}": field.replace("HERE", form) for name, form in forms.items()}
    return fields


HI = '{"role":"user","content":"Hi"}'
CHAT_BODY = '"max_tokens":2,"messages":[HERE]'
RESPONSES_BODY = '"max_output_tokens":16,"input":[HERE]'
CLAUDE_BODY = '"model":"demo","max_tokens":2,"messages":[HERE]'
OLLAMA_BODY = '"model":"demo","options":{"num_predict":2},"messages":[HERE]'
OLLAMA_CALL = '{"role":"assistant","tool_calls":[HERE]},'
OLLAMA_HISTORIES = {
    "messages of one letter": f"«{USER}»",
    "turns of one letter": f"«{USER}{ASSISTANT}»",
    "calls": OLLAMA_CALL.replace("HERE", '«{"function":{"name":"f","arguments":{}}},»') + USER[:-1],
    "a call and its result, again": "«"
    + OLLAMA_CALL.replace("HERE", '{"function":{"name":"f","arguments":{}}}')
    + '{"role":"tool","tool_name":"f","content":"r"},»',
    "results without calls": '«{"role":"tool","tool_name":"f","content":"r"},»',
    "thoughts": '«{"role":"assistant","content":"b","thinking":"a"},»' + USER[:-1],
    "images": '{"role":"user","content":"a","images":[«"AAAA",»]}',
    "options": '{"role":"user","content":"a"}],"options":{«"o#":1,»},"tools":[',
}
CHAT_SCHEMA = '"response_format":{"type":"json_schema","json_schema":{"name":"s","schema":HERE}}'
LOOSE_SCHEMA = CHAT_SCHEMA.replace('"name"', '"strict":false,"name"')
ITEM_SCHEMA = '"text":{"format":{"type":"json_schema","name":"s","schema":HERE}}'
CLAUDE_SCHEMA = '"output_config":{"format":{"type":"json_schema","schema":HERE}}'


def _texts(*templates: str) -> Forms:
    """Return the texts within each of these, with the name of what is around them."""
    return {
        f"{name} in {number}": template.replace("HERE", form)
        for number, template in enumerate(templates)
        for name, form in TEXTS.items()
    }


def _fields() -> Iterator[tuple[str, Forms]]:
    """Yield forms of what is in the body of a route, by the route."""
    user = '{"role":"user","content":"HERE"}'
    says = '{"role":"assistant","content":"HERE"},' + HI
    called = f"{ONE_CALL.replace('{}', 'HERE')}{RESULT.replace('#', '').replace(chr(34) + 'r', chr(34) + 'HERE')}{HI}"
    chat = CHAT_BODY.replace("HERE", user)
    hi = CHAT_BODY.replace("HERE", HI)
    yield CHAT, within(CHAT_BODY, CHAT_HISTORIES)
    yield CHAT, _texts(chat, CHAT_BODY.replace("HERE", says), CHAT_BODY.replace("HERE", called.replace("#", "")))
    yield CHAT, within(hi + ',"tools":[HERE]', CHAT_TOOLS)
    yield CHAT, within(hi + ',"tool_choice":"required","tools":[HERE]',
                       {f"called, {name}": form for name, form in CHAT_TOOLS.items()})  # fmt: skip
    yield CHAT, within(f"{hi},HERE", {**SAMPLING, **_constraints(CHAT_SCHEMA, "all")})
    yield COMPLETIONS, _texts('"max_tokens":2,"prompt":"HERE"', '"max_tokens":2,"prompt":"a","suffix":"HERE"')
    yield COMPLETIONS, within('"max_tokens":2,"prompt":HERE', PROMPTS)
    yield COMPLETIONS, within('"max_tokens":0,"echo":true,"logprobs":1,"prompt":HERE',
                              {f"echo of {name}": form for name, form in PROMPTS.items()})  # fmt: skip
    yield COMPLETIONS, within('"max_tokens":2,"prompt":"a",' + LOOSE_SCHEMA,
                              {f"not strict, schema: {name}": form for name, form in SCHEMAS.items()})  # fmt: skip
    yield COMPLETIONS, within('"max_tokens":2,"prompt":"a",HERE', {**SAMPLING, **_constraints(CHAT_SCHEMA, "all")})
    hi = RESPONSES_BODY.replace("HERE", HI)
    for path in (RESPONSES, INPUT_TOKENS, COMPACT):
        body = RESPONSES_BODY if path == RESPONSES else '"input":[HERE]'
        yield path, within(body, ITEMS)
        yield path, _texts(body.replace("HERE", user), body.replace("HERE", HI) + ',"instructions":"HERE"')
        yield path, within(body.replace("HERE", HI) + ',"tools":[HERE]', FLAT_TOOLS)
    yield RESPONSES, within(f'"truncation":"auto",{RESPONSES_BODY}', {f"cut, {name}": ITEMS[name] for name in ITEMS})
    yield RESPONSES, within(f"{hi},HERE", {**SAMPLING, **_constraints(ITEM_SCHEMA)})
    yield RESPONSES, within(f'{hi},"include":[HERE]', {"include": '«"reasoning.encrypted_content",»'})
    hi = CLAUDE_BODY.replace("HERE", HI)
    for path in (MESSAGES, COUNT_TOKENS):
        yield path, within(CLAUDE_BODY, TURNS)
        yield path, _texts(CLAUDE_BODY.replace("HERE", user), f'{hi},"system":"HERE"')
        yield path, within(f'{hi},"tools":[HERE]', CLAUDE_TOOLS)
        yield path, within(f'{hi},"system":[HERE]', {"system of parts": '«{"type":"text","text":"a"},»'})
    yield (
        MESSAGES,
        within(f"{hi},HERE", {"stop_sequences": '"stop_sequences":[«"s#",»]', **_constraints(CLAUDE_SCHEMA)}),
    )
    for path in (CONVERSATIONS, f"{CONVERSATION}/items"):
        yield path, within('"items":[HERE]', ITEMS)
        yield path, _texts(f'"items":[{user}]')
    for path in (CONVERSATIONS, CONVERSATION, BATCHES):
        yield path, {"metadata": SAMPLING["metadata"], "long metadata": '"metadata":{"a":"«a»"}'}
    yield TOKENIZE, {**_texts('"prompt":"HERE"'), **within('"messages":[HERE]', CHAT_HISTORIES)}
    yield TOKENIZE, within(f'"messages":[{HI}],"tools":[HERE]', CHAT_TOOLS)
    yield DETOKENIZE, within('"tokens":HERE', PROMPTS)
    yield EMBEDDINGS, {**within('"input":HERE', PROMPTS), **_texts('"input":"HERE"')}
    texts = {"texts of one letter": '«"a",»', "empty texts": '«"",»', "a long text": '"«word »"'}
    parts = '«{"content":[{"type":"text","text":"a"}]},»'
    for path in (FEATURES, *OF_TOKENS):
        yield path, within('"inputs":[HERE]', texts)
    yield EMBED, {**within('"texts":[HERE]', texts), **within('"inputs":[HERE]', {"texts in parts": parts})}
    hi = OLLAMA_BODY.replace("HERE", HI)
    yield OLLAMA_CHAT, {**within(OLLAMA_BODY, OLLAMA_HISTORIES), **_texts(OLLAMA_BODY.replace("HERE", user))}
    yield (
        OLLAMA_CHAT,
        {**within(f'{hi},"tools":[HERE]', CHAT_TOOLS), **within(f"{hi},HERE", _constraints('"format":HERE'))},
    )
    yield OLLAMA_GENERATE, _texts(*(f'"model":"demo","{field}":"HERE"' for field in ("prompt", "suffix", "system")))
    yield OLLAMA_GENERATE, within('"model":"demo","prompt":"a",HERE', _constraints('"format":HERE'))
    yield OLLAMA_EMBED, {**within('"model":"demo","input":[HERE]', texts), **_texts('"model":"demo","input":"HERE"')}
    yield OLLAMA_EMBED_ONE, _texts('"model":"demo","prompt":"HERE"')
    yield MESSAGE_BATCHES, within('"requests":[HERE]', {"requests": '«{"custom_id":"#","params":{}},»'})
    yield SCORES[0], {**within('"text_1":"a","text_2":[HERE]', texts), "both": '"text_1":[«"a",»],"text_2":[«"a",»]'}
    yield RERANKS[0], {**within('"query":"a","documents":[HERE]', texts), **_texts('"query":"HERE","documents":["a"]')}


PART = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="HERE"\r\n\r\n'
END = f"\r\n--{BOUNDARY}--\r\n"
PURPOSE = PART.replace("HERE", "purpose") + "batch\r\n"
FILE = PART.replace("HERE", 'file"; filename="a.jsonl')
UPLOADS = {
    "a file": f"{PURPOSE}{FILE}«a»{END}",
    "line ends": f"{PURPOSE}{FILE}«\r\n»{END}",
    "boundaries": f"{PURPOSE}{FILE}«\r\n--{BOUNDARY}\r\n»{END}",
    "almost boundaries": f"{PURPOSE}{FILE}«\r\n--{BOUNDARY[:-1]}»{END}",
    "parts": f"{PURPOSE}«{PART.replace('HERE', 'p')}a\r\n»{FILE}a{END}",
    "headers of a part": f"{PURPOSE}{FILE[:-2]}«x-h: a\r\n»\r\na{END}",
    "a long name": f"{PURPOSE}{PART.replace('HERE', 'file' + chr(34) + '; filename=' + chr(34) + '«a»')}a{END}",
    "parameters": f'{PURPOSE}{FILE[:-4]}«; a*0="b"»\r\n\r\na{END}',
    "a long purpose": f"{PART.replace('HERE', 'purpose')}«a»\r\n{FILE}a{END}",
    "a preamble": f"«a\r\n»{PURPOSE}{FILE}a{END}",
    "lines of a batch": f'{PURPOSE}{FILE}«{{"custom_id":"#","method":"POST","url":"/v1/score","body":{{}}}}\n»{END}',
    "an unended part": f"{PURPOSE}{FILE}«a\r\n»",
}  # fmt: skip


def forms() -> list[Form]:
    """Return all forms, by route."""
    all_forms = [Form(path, name, f"{{{fields}}}") for path, named in _fields() for name, fields in named.items()]
    for path in (FILES, *SPEECH):
        all_forms += [Form(path, name, text, MULTIPART) for name, text in UPLOADS.items()]
    for path in dict.fromkeys((*(form.path for form in all_forms), *BARE)):
        all_forms += [Form(path, f"any: {name}", text) for name, text in ANY.items()]
        packed = {"content-encoding": "gzip"}
        all_forms += [Form(path, f"any: {name}, packed", ANY[name], packed) for name in ("white space", "deep lists")]
    return sorted(all_forms, key=lambda form: form.path)
