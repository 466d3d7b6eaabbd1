"""Histories that are damaged, began elsewhere or came from this server itself, with each chat template in llama.cpp's
source: none is refused."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.errors import InvalidRequest
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.tools import Tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.dialects.hermes import HERMES
from tests.real.test_templates import (
    AGAIN,
    CALL_ALONE,
    CLOCK,
    FORECAST,
    SAID,
    SYSTEM,
    USER,
    calling,
    loaded,
    rendered,
    result,
)
from tests.routes.dialects.reading import Read, own_form, read, segments_of

pytestmark = pytest.mark.real

ARGUMENTS = [
    *('{"text": "', "null", "[]", '"x"', "5", "garbage", '{"a":' * 500, "{'city': 'Paris'}", '{"a": "\\ud83d', ""),
    '{"a": [{"b": 1e999, "c": "\\u0000"}]}',
]
NO_ID = {"function": {"name": "clock"}}
NOTHING = {"role": "assistant", "content": None}
LEGACY = {"name": "clock", "arguments": '{"zone": "zone-utc"}'}
PARTS = [
    {"type": "thinking", "thinking": "hm", "signature": "x"},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "output_text", "text": "said-first", "annotations": []},
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
]
CLOCKED = calling(("clock", "{}"))
HISTORIES: dict[str, list[dict[str, Any]]] = {
    **{f"arguments {one[:9]}": [calling(("clock", one)), result("got-first"), AGAIN] for one in ARGUMENTS},
    "unknown tool": [calling(("nobody knows", "{}")), result("got-first"), AGAIN],
    "no name": [{**CLOCKED, "tool_calls": [{"id": "a"}]}, result("got-first"), AGAIN],
    "no ids": [{**CLOCKED, "tool_calls": [NO_ID, NO_ID]}, {"role": "tool", "content": "got-first"}, AGAIN],
    "no result": [CLOCKED, AGAIN],
    "no result at the end": [CLOCKED],
    "no call": [result("got-first"), AGAIN],
    "two results": [CLOCKED, result("got-first"), result("got-second"), AGAIN],
    "other order": [calling(("clock", "{}"), ("forecast", "{}")), result("got-second", 1), AGAIN, result("got-first")],
    "equal ids": [*[CLOCKED, result("got-first")] * 2, AGAIN],
    "calls in a row": [CLOCKED, CLOCKED, result("got-first"), result("got-second"), AGAIN],
    "answers in a row": [SAID, SAID, CLOCKED, result("got-first"), AGAIN],
    "nothing": [NOTHING, AGAIN, {**NOTHING, "content": ""}, AGAIN, {**NOTHING, "content": []}, AGAIN],
    "nothing at the end": [NOTHING],
    "empty contents": [{"role": "user", "content": []}, {"role": "user"}],
    "odd results": [*[CLOCKED, result({"a": [1]}), CLOCKED, result([1, "a"]), CLOCKED, result(None)], AGAIN],
    "the older form": [{**NOTHING, "function_call": LEGACY}, {"role": "function", "name": "clock", "content": "got"}],
    "parts": [
        {"role": "assistant", "content": PARTS},
        {"role": "user", "content": [*PARTS[3:], {"type": "x"}]},
        SAID,
        AGAIN,
    ],
    "other fields": [{**SAID, "annotations": [], "audio": {"id": "x"}, "reasoning_details": [{"a": 1}]}, AGAIN],
    "ends with the system": [SAID, SYSTEM],
}
ALONE = {"system alone": [SYSTEM], "answer alone": [SAID], "result alone": [result("got-first")]}


def templates(llama_cpp: Path) -> list[Path]:
    return sorted((llama_cpp / "models/templates").glob("*.jinja"))


def faults(
    path: Path, loaded: tuple[ChatTemplate, Dialect], name: str, messages: Sequence[dict[str, Any]]
) -> list[str]:
    results = []
    for tools in ({"tools": [CLOCK]}, {}):
        try:
            prompt = rendered(*loaded, {"messages": messages, **tools})
        except InvalidRequest as refused:
            results.append(f"{path.stem}, {name}: {refused}")
        else:
            said = {one["content"] for one in messages if isinstance(one.get("content"), str)}
            texts = {"ask-second", "got-first", "got-second", "said-first"} & said
            if any(one in path.stem for one in CALL_ALONE) and name == "answers in a row":
                texts.discard("said-first")
            results += [f"{path.stem}, {name}: lacks {text}" for text in texts if text not in prompt]
    return results


def test_no_template_rejects_a_damaged_history(llama_cpp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Python may collect the garbage of many tests while a template renders.
    monkeypatch.setattr("oaiserve.engine.text.jinja_template.thread_work_ns", lambda: 0)
    results = []
    for path in templates(llama_cpp):
        both = loaded(path)
        for name, messages in HISTORIES.items():
            results += faults(path, both, name, [USER, *messages])
        for name, messages in ALONE.items():
            results += faults(path, both, name, messages)
    assert "\n".join(results) == ""


def as_message(answer: Read) -> dict[str, Any]:
    """Return an answer as a client sends it back."""
    calls = [
        {"id": f"callid00{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(answer.calls)
    ]
    more = {"tool_calls": calls} if calls else {}
    content = answer.content or (None if calls else "")
    return {"role": "assistant", "content": content, "reasoning_content": answer.reasoning or None, **more}


def test_every_template_takes_the_answers_of_its_own_dialect_cut_anywhere(llama_cpp: Path) -> None:
    collected = []
    tools = [FORECAST["function"], CLOCK["function"]]
    shown = Tools([CLOCK], {tool["name"]: tool["parameters"] for tool in tools}, "auto", only_one=False)
    arguments = {"zone": 'zone "utc"\n</x> {', "more": [1, {"a": None}]}
    for path in templates(llama_cpp):
        both = loaded(path)
        random = Random(path.stem)
        dialect = both[1]
        family = dialect.calls or HERMES
        written = own_form(family, "clock", arguments)
        opening, closing = ("<think>", "</think>") if dialect.reasoning is None else dialect.reasoning.tags
        for whole in (
            written,
            f"{opening}hm{closing}Well. {written}",
            f"hm{closing}{written}{written}",
            "Just text. {",
        ):
            for cut in {0, 1, len(whole) - 1, len(whole), *(random.randrange(len(whole)) for _ in range(8))}:
                conversation = Conversation(dialect, shown, {}, is_constrained=False)
                answer = read(segments_of(conversation.reader(), [whole[:cut]], is_cut=True))
                message = as_message(answer)
                results = [result("got-first", number) for number in range(len(answer.calls))]
                collected += faults(path, both, f"{whole[:cut]!r}", [USER, message, *results, AGAIN])
    assert "\n".join(collected) == ""
