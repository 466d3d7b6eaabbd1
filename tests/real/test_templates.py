"""Renders the chat templates in llama.cpp's source for the requests that clients send."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE
from transformers.utils.chat_template_utils import render_jinja_template

from oaiserve.checkpoints.gguf import read_head
from oaiserve.engine.text.builtin_templates import NAMES, template_file
from oaiserve.engine.text.chat_template import NO_SPECIAL_TEXTS, ChatTemplate
from oaiserve.engine.text.gguf.tokenizer import add_tokens
from oaiserve.engine.text.gguf.vocabulary import Vocabulary
from oaiserve.engine.text.special_tokens import SpecialTexts, control_tokens
from oaiserve.engine.text.template_text import by_template, plain
from oaiserve.errors import InvalidRequest
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.messages import build_prompt
from oaiserve.routes.chat.tools import requested_tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.intake.body_types import ChatBody
from tests.plugins.dialects.known import dialect_of

pytestmark = pytest.mark.real

# How the models behind the templates write calls, in the order of the files' names.
DIALECTS = {
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "Kimi-K2-Instruct": "kimi_k2",
    "Kimi-K2-Thinking": "kimi_k2",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "LFM2.5-Instruct": "lfm2",
    "MiniMax-M2": "minimax_m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen3.5-4B": "qwen3_coder",
    "Spark2.5": "glm45",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "ibm-granite-granite-4.1": "hermes",
    "inclusionai-ling-3.0-flash": "glm45",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "openai",
}
# Templates without a place for text next to a call.
CALL_ALONE = (
    "Cohere2MoE",
    "command-r7b",
    "Hermes-2-Pro",
    "Hermes-3",
    "MiniMax-M1",
    "Mistral-Small",
    "Mistral-Nemo",
    "muse",
    "Solar-Open",
)

USER, AGAIN = ({"role": "user", "content": text} for text in ("ask-first", "ask-second"))
SYSTEM = {"role": "system", "content": "rule-one"}
SAID = {"role": "assistant", "content": "said-first"}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}, "required": ["city"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "place": PLACE,
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": ["integer", "null"]},
    },
    "required": ["place"],
}
FORECAST, CLOCK = (
    {"type": "function", "function": {"name": name, "description": "It looks.", "parameters": schema}}
    for name, schema in (
        ("forecast", SCHEMA),
        ("clock", {"type": "object", "properties": {"zone": {"type": "string"}}}),
    )
)
BARE = {"type": "function", "function": {"name": "clock"}}
UNDESCRIBED = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"properties": {"a": {"type": "string"}}}},
}

ODD_PROPERTIES = {
    "types": {"type": ["string", "null"], "description": None},
    "any": True,
    "nothing": {"type": "null"},
    "either": {"anyOf": [{"type": "array", "items": True}, {"enum": ["a", None]}]},
    "nested": {"type": "object", "properties": {"of": {"$ref": "#/$defs/of"}}},
}
ODD_SCHEMA, NO_PROPERTIES = (
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", **more}}}
    for more in ({"properties": ODD_PROPERTIES, "$defs": {"of": {"type": "array", "items": [{}]}}}, {})
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(*calls: tuple[str, str], **fields: Any) -> dict[str, Any]:
    ids = [f"callid00{number}" for number in range(len(calls))]
    listed = [
        {"id": one, "type": "function", "function": {"name": name, "arguments": arguments}}
        for one, (name, arguments) in zip(ids, calls, strict=True)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed, **fields}


def result(text: Any, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"callid00{number}", "content": text}


ODD = 'ß 日本 👩‍👧 <b>&amp; {{x}} "q" end'
ROME = ("forecast", '{"place": {"city": "city-rome"}, "days": null}')
UTC = ("clock", '{"zone": "zone-utc"}')
ROUND = [USER, calling(ROME), result("got-first")]
SEEN = ("ask-first", "city-rome", "got-first")
LAST = ("said-first", "ask-second")
# Each: the body of a request without its model, and the texts that the prompt must have once each.
REQUESTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "user": ({"messages": [USER]}, ("ask-first",)),
    "system": ({"messages": [SYSTEM, USER]}, ("rule-one", "ask-first")),
    "developer": ({"messages": [{**SYSTEM, "role": "developer"}, USER]}, ("rule-one", "ask-first")),
    "turns": ({"messages": [SYSTEM, USER, SAID, AGAIN]}, ("rule-one", "ask-first", *LAST)),
    "parts": ({"messages": [{"role": "user", "content": parts("part-a", "part-b")}]}, ("part-a", "part-b")),
    "answer in parts": (
        {"messages": [USER, {"role": "assistant", "content": parts("said-first")}, AGAIN]},
        ("ask-first", *LAST),
    ),
    "unicode": ({"messages": [{"role": "user", "content": ODD}]}, (ODD,)),
    "late system": ({"messages": [USER, SAID, SYSTEM, AGAIN]}, ("rule-one", "ask-first", *LAST)),
    "two users": ({"messages": [USER, AGAIN]}, ("ask-first", "ask-second")),
    "assistant first": ({"messages": [SAID, USER]}, ("said-first", "ask-first")),
    "no prompt": ({"messages": [USER, SAID], "add_generation_prompt": False}, ("ask-first", "said-first")),
    "thinking off": ({"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}}, ("ask-first",)),
    "thinking on": ({"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}}, ("ask-first",)),
    "effort": ({"messages": [USER], "reasoning_effort": "low"}, ("ask-first",)),
    "reasoning": ({"messages": [USER, {**SAID, "reasoning_content": "hm"}, AGAIN]}, ("ask-first", *LAST)),
    "tools": ({"messages": [SYSTEM, USER], "tools": [FORECAST, CLOCK]}, ("rule-one", "ask-first")),
    "no description": ({"messages": [SYSTEM, USER], "tools": [UNDESCRIBED]}, ("rule-one", "ask-first")),
    "odd schema": ({"messages": [USER], "tools": [ODD_SCHEMA]}, ("ask-first",)),
    "no properties": ({"messages": [USER], "tools": [NO_PROPERTIES]}, ("ask-first",)),
    "only a name": ({"messages": [USER], "tools": [BARE]}, ("ask-first",)),
    "result": ({"messages": ROUND, "tools": [FORECAST]}, SEEN),
    "result in parts": ({"messages": [*ROUND[:2], result(parts("got-first"))], "tools": [FORECAST]}, SEEN),
    "result in JSON": ({"messages": [*ROUND[:2], result('{"got-first": [1]}')], "tools": [FORECAST]}, SEEN),
    "user after a result": ({"messages": [*ROUND, AGAIN], "tools": [FORECAST]}, (*SEEN, "ask-second")),
    "thought alone": (
        {"messages": [USER, {"role": "assistant", "content": None, "reasoning": "hm"}, AGAIN]},
        ("ask-first", "ask-second"),
    ),
    "after a result": ({"messages": [*ROUND, SAID, AGAIN], "tools": [FORECAST]}, (*SEEN, *LAST)),
    "calls without tools": ({"messages": [*ROUND, SAID, AGAIN]}, (*SEEN, *LAST)),
    "text and call": (
        {
            "messages": [USER, calling(ROME, content="said-first", reasoning_content="hm"), ROUND[2]],
            "tools": [FORECAST],
        },
        (*SEEN, "said-first"),
    ),
    "two calls": (
        {
            "messages": [USER, calling(ROME, UTC), result("got-first"), result("got-second", 1)],
            "tools": [FORECAST, CLOCK],
        },
        (*SEEN, "zone-utc", "got-second"),
    ),
    "no arguments": (
        {"messages": [USER, calling(("clock", "")), result("got-first")], "tools": [CLOCK]},
        ("ask-first", "got-first"),
    ),
    "two rounds": (
        {"messages": [*ROUND, calling(UTC), result("got-second")], "tools": [FORECAST, CLOCK]},
        (*SEEN, "zone-utc", "got-second"),
    ),
}
# Notations of Python, or of JSON within JSON, in place of a text.
TAG = re.compile(r"""[<\[][^\s<>\[\]'"{},()=]*[A-Za-z][^\s<>\[\]'"{},()=]*[>\]]""")
NOTATION = re.compile(r"""\{'place': \{'city': 'city|\['ask|\\"place|\[\{"type": "text", "text"|Undefined""")


class NoMedia:
    def taken(self, _messages: object, _note: object) -> tuple[()]:
        return ()

    def part(self, _part: object, where: str, param: str, *, is_asked: bool) -> NoReturn:
        raise InvalidRequest(f"{where} is not read", param=param)


@cache
def loaded(path: Path) -> tuple[ChatTemplate, Dialect]:
    template = ChatTemplate(path.read_text(), {"bos_token": "<s>", "eos_token": "</s>"})
    return template, dialect_of("auto", "auto", template, {})


def rendered(
    template: ChatTemplate, dialect: Dialect, body: dict[str, Any], special: SpecialTexts = NO_SPECIAL_TEXTS
) -> str:
    parsed = msgspec.json.decode(json.dumps(body), type=ChatBody)
    conversation = Conversation(
        dialect,
        requested_tools(parsed, Adaptations().note),
        parsed.chat_template_kwargs or {},
        effort=parsed.reasoning_effort,
        is_constrained=False,
        asks_for_answer=parsed.add_generation_prompt is not False,
    )
    prompt = build_prompt(
        parsed,
        parsed.messages,
        dialect,
        conversation.shown_tools,
        NoMedia(),  # type: ignore[arg-type]
        Adaptations().note,
    )
    return template.render(conversation.completed(prompt), special)


def test_each_template_renders_each_request(llama_cpp: Path) -> None:
    paths = sorted((llama_cpp / "models/templates").glob("*.jinja"))
    assert len(paths) >= 70
    faults = []
    for path in (*paths, *(template_file(Path(name)) for name in NAMES)):
        template, dialect = loaded(path)
        for request, (body, texts) in REQUESTS.items():
            try:
                prompt = rendered(template, dialect, body)
            except InvalidRequest as refused:
                faults.append(f"{path.stem}, {request}: {refused}")
                continue
            is_alone = request == "text and call" and any(part in path.stem for part in CALL_ALONE)
            wanted = [text for text in texts if not (is_alone and text == "said-first")]
            wanted += [tool["function"]["name"] for tool in body.get("tools", ())]
            faults += [f"{path.stem}, {request}: lacks {text!r}" for text in wanted if text not in prompt]
            faults += [f"{path.stem}, {request}: repeats {text!r}" for text in texts if prompt.count(text) > 1]
            faults += [f"{path.stem}, {request}: has {each!r}" for each in NOTATION.findall(prompt)]
    assert "\n".join(faults) == ""


# Built-in templates with the real ones that they stand for, and what only these write for a conversation of plain text.
BUILT_IN = {
    "gemma": ("google-gemma-2-2b-it", ""),
    "granite": ("ibm-granite-granite-3.3-2B-Instruct", ""),
    "llama3": (
        "meta-llama-Llama-3.2-3B-Instruct",
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
    ),
    "mistral-nemo": ("mistralai-Mistral-Nemo-Instruct-2407", ""),
    "mistral-small": ("Mistral-Small-3.2-24B-Instruct-2506", ""),
    "phi3": ("microsoft-Phi-3.5-mini-instruct", ""),
    "qwen": ("Qwen-Qwen2.5-7B-Instruct", ""),
    "qwen3": ("Qwen-Qwen3-0.6B", ""),
    "deepseek": ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "<think>\n"),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_template_writes_what_transformers_writes_with_the_real_one(name: str, llama_cpp: Path) -> None:
    file, only_there = BUILT_IN[name]
    real = (llama_cpp / f"models/templates/{file}.jinja").read_text()
    built_in = template_file(Path(name)).read_text()
    turns = [SYSTEM, USER, SAID, AGAIN]
    conversations = [turns] if name != "gemma" else []  # The real one rejects systems, unlike Gemma 3's.
    conversations += [turns[1:], [USER]] if name not in ("granite", "mistral-small", "llama3") else []
    for messages in conversations:
        variables = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
        ours, theirs = (
            render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **variables)[0][0]
            for source in (built_in, real)
        )
        assert ours == theirs.replace(only_there, "")


def test_each_template_shows_its_dialect(llama_cpp: Path) -> None:
    names = {}
    for name in DIALECTS:
        calls = loaded(llama_cpp / f"models/templates/{name}.jinja")[1].calls
        names[name] = None if calls is None else calls.name
    assert names == DIALECTS


def test_no_text_of_a_conversation_forges_a_tag_of_any_template(llama_cpp: Path) -> None:
    for path in sorted((llama_cpp / "models/templates").glob("*.jinja")):
        template, dialect = loaded(path)
        tags = sorted(set(TAG.findall(template.source)))
        special = SpecialTexts(tags)

        def written(text: str) -> list[str]:
            call = calling(("clock", json.dumps({"zone": f"utc{text}"})), reasoning_content=f"hm{text}")
            said = [{**message, "content": f"said{text}"} for message in (USER, SAID)]
            tool = {**CLOCK, "function": {**CLOCK["function"], "description": f"It looks{text}"}}
            body = {"messages": [said[0], call, result(f"got{text}"), said[1], AGAIN], "tools": [tool]}
            prompt = rendered(template, dialect, body, special)  # noqa: B023
            return [tag for _, tag in special.written(prompt) if tag]  # noqa: B023

        assert written("".join(tags)) == written(""), path.stem


def with_texts_from_outside() -> dict[str, Any]:
    """Return a request with a text of its own, `outside1q` and so on, in each place that a client can fill."""
    numbers = iter(range(100))

    def text() -> str:
        return f"outside{next(numbers)}q"

    value = {"type": "string", "description": text(), "title": text(), "enum": [text(), text()], text(): text()}
    nested = {"type": "object", "properties": {text(): {"type": "string", text(): [text()]}}, "required": [text()]}
    properties = {text(): value, text(): nested, text(): {"type": ["string", "null"], "default": text()}}
    schema = {
        "type": "object",
        "title": text(),
        "properties": properties,
        "required": [text()],
        text(): {text(): [text()]},
    }
    function = {"name": text(), "description": text(), "parameters": schema}
    arguments = {text(): text(), text(): {text(): [text(), 1]}}
    call = calling((function["name"], json.dumps(arguments)), content=text(), reasoning_content=text())
    messages = [
        {"role": "system", "content": text(), "name": text()},
        {"role": "user", "content": text(), "name": text()},
        call,
        result(text()),
        {**SAID, "content": text()},
        {"role": "user", "content": parts(text(), text())},
    ]
    documents = [{"title": text(), "text": text(), "doc_id": text(), text(): text()}]
    more = {"documents": documents, "custom_instructions": text(), "user_name": text()}
    tools = [{"type": "function", "function": function}]
    return {"messages": messages, "tools": tools, "chat_template_kwargs": more}


OUTSIDE = re.compile(r"outside\d+q")
MOST_AROUND = 8  # characters around a text from outside that are tried as parts of a control token


def tokens_around(prompt: str) -> Iterator[str]:
    """Yield control tokens that the template's text would complete: one for each place where one can be split."""
    for match in OUTSIDE.finditer(prompt):
        before = prompt[max(0, match.start() - MOST_AROUND) : match.start()]
        after = prompt[match.end() : match.end() + MOST_AROUND]
        for left in range(len(before) + 1):
            for right in range(len(after) + 1):
                yield before[len(before) - left :] + match[0] + after[:right]


def written(special: SpecialTexts, text: str) -> list[str]:
    return [token for _, token in special.written(text) if token]


def test_what_a_template_puts_around_a_text_from_outside_makes_no_control_token_of_it(llama_cpp: Path) -> None:
    body = with_texts_from_outside()
    num_places = 0
    for path in sorted((llama_cpp / "models/templates").glob("*.jinja")):
        template, dialect = loaded(path)
        text = rendered(template, dialect, body)
        tags = {tag for tag in TAG.findall(template.source) if not OUTSIDE.search(tag)}
        forged = {*tokens_around(plain(text))}
        num_places += len(OUTSIDE.findall(plain(text)))
        own = written(SpecialTexts(tags), text)
        simple = rendered(template, dialect, {"messages": [USER, SAID, AGAIN]})
        assert written(SpecialTexts(tags), simple) == written(SpecialTexts(tags), by_template(plain(simple))), path.stem
        both = SpecialTexts(tags | forged)
        assert both.is_forged(text), path.stem
        assert written(both, text) == own, path.stem
    assert num_places > 1000


def splits(tokens: Collection[str]) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Return the tokens by their beginning and end, with the part between these, which is not empty."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for token in tokens:
        for left in range(len(token)):
            for right in range(left + 1, len(token) + 1):
                if left or right < len(token):
                    found.setdefault((token[:left], token[right:]), []).append((token, token[left:right]))
    return found


def control_texts(path: Path) -> list[str]:
    """Return the control tokens of a GGUF file. The rest of its tokenizer, which takes a second, isn't made."""
    tokenizer = RustTokenizer(BPE())
    add_tokens(tokenizer, Vocabulary(read_head(path).read_tokenizer()))
    return [*control_tokens(tokenizer, "", splits_special=False)]


def test_no_template_completes_a_control_token_of_a_vocabulary(llama_cpp: Path) -> None:
    body = with_texts_from_outside()
    found = map(control_texts, (llama_cpp / "models").glob("ggml-vocab-*.gguf"))
    # One token is tried of those that differ in their number alone.
    tokens = {re.sub(r"\d+", "7", token): token for one in found for token in one}.values()
    by_sides = splits(tokens)
    num_tried = 0
    for path in sorted((llama_cpp / "models/templates").glob("*.jinja")):
        template, dialect = loaded(path)
        special = SpecialTexts({*tokens, *TAG.findall(template.source)})
        harmless = rendered(template, dialect, body)
        own = Counter(written(special, harmless))
        text = plain(harmless)
        tried = {
            (match[0], token, part)
            for match in OUTSIDE.finditer(text)
            for left in range(30)
            for right in range(30)
            for token, part in by_sides.get(
                (text[match.start() - left : match.start()], text[match.end() : match.end() + right]), ()
            )
        }
        for name, token, part in tried:
            hostile = json.loads(json.dumps(body).replace(name, json.dumps(part)[1:-1]))
            forged = rendered(template, dialect, hostile)
            assert Counter(written(special, forged))[token] <= own[token], (path.stem, name, token, part)
        num_tried += len(tried)
    assert num_tried > 100
