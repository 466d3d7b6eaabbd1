"""Tests the answers of /v1/messages: whole messages, streams that gather to the same ones, and calls."""

import re
from collections.abc import Sequence
from typing import Any

import jiter
import pytest

from oaiserve.engine.request import FinishReason, PromptDone, TokenChunk
from oaiserve.engine.text.chat_template import ChatTemplate
from oaiserve.facts.record import Outcome, ToolCallOutcome
from oaiserve.facts.times import RequestTimes
from oaiserve.plugins.messages.shape import MessagesShape
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.tools import Tools
from oaiserve.routes.dialects.dialect import dialect_of
from oaiserve.routes.exchange import AnswerFacts
from oaiserve.routes.intake.parameters import Wanted
from oaiserve.routes.intake.read import Head
from oaiserve.routes.prompt_reuse import PromptReuse
from tests.plugins.messages.asking import TOOLS, USE, ask, said, streamed, thought, tool
from tests.routes.asking import CALL, CHATML, HYBRID, MESSAGES, PIECES, THOUGHT, ZONE
from tests.routes.doubles import says
from tests.serving import Serve, Served

BROKEN = '<tool_call>\n{"name": "get_time", "arguments": {"zone": utc}}\n</tool_call>'
# Of the prompt's three tokens, two are in the prefix cache.
USAGE = {"input_tokens": 1, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0, "output_tokens": 2}
CUT_USE = {**USE, "input": {"zone": "utc", "at": 1, "x": {"y": []}}}
CUT = '<tool_call>\n{"name": "get_time", "arguments": {"zo'


def gathered(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client makes of a stream, and check that the blocks come one after the other."""
    message = events[0]["message"]
    assert message["usage"]["output_tokens"] == 1  # as at Anthropic, whatever comes
    blocks = []
    is_open = False
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            blocks.append(event["content_block"])
            inputs: list[str] = []
        assert event["index"] == len(blocks) - 1
        is_open = event["type"] != "content_block_stop"
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            block = blocks[-1]
            kind = delta.pop("type").removesuffix("_delta")
            assert kind in ("input_json", "signature", block["type"])
            if kind == "input_json":
                inputs.append(delta["partial_json"])
            else:
                block[kind] += delta[kind]
        if event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = jiter.from_json("".join(inputs or "{}").encode(), partial_mode=True)  # as SDKs do
    assert not is_open
    return {**message, "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    assert message["id"].startswith("msg_")
    blocks = [{**block} for block in message["content"]]
    ids = [block.pop("id") for block in blocks if block["type"] == "tool_use"]
    assert all(each.startswith("toolu_") for each in ids)
    assert len(ids) == len(set(ids))
    return {**message, "id": "msg", "content": blocks}


def test_a_whole_answer_has_the_documented_shape(served: Served) -> None:
    assert without_ids(ask(served)) == {
        "id": "msg",
        "type": "message",
        "diagnostics": None,
        "role": "assistant",
        "model": "org/demo",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": USAGE,
    }
    record = served.telemetry.next_record()
    assert (record.operation, record.http_route, record.outcome) == ("messages", MESSAGES, Outcome.FINISHED)


def test_a_stream_has_exactly_these_events(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says("<think>", "Hm", "</think>", "Well. ", *PIECES))
    events = streamed(served, tools=TOOLS, stream_options={"include_timings": True})
    assert [events[0]["message"][name] for name in ("content", "stop_reason")] == [[], None]
    assert [events[0]["message"]["usage"][f"{name}input_tokens"] for name in ("", "cache_read_")] == [1, 2]
    assert events[-2].pop("timings").keys() > {"cached_tokens"}
    usage = {**USAGE, "output_tokens": 10, "output_tokens_details": {"thinking_tokens": 3}}

    def of_block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
        place = {"type": "content_block_delta", "index": index}
        return [
            {"type": "content_block_start", "index": index, "content_block": start},
            *({**place, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": index},
        ]

    signed = {"type": "signature_delta", "signature": ""}
    call = {**USE, "id": events[8]["content_block"]["id"], "input": {}}
    assert events[1:] == [
        *of_block(0, thought(""), {"type": "thinking_delta", "thinking": "Hm"}, signed),
        *of_block(1, said(""), {"type": "text_delta", "text": "Well. "}),
        *of_block(2, call, {"type": "input_json_delta", "partial_json": ZONE}),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": usage},
        {"type": "message_stop"},
    ]


@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("", [], "end_turn"),
        ("Hello there", [said("Hello there")], "end_turn"),
        (f"<think>\nI think.</think>\n\nYes {CALL}\n{CALL}", [thought("I think."), said("Yes "), USE, USE], "tool_use"),
        ('Yes.\n```json\n{"name": "get_time", "arguments": {"zone": "utc"}}\n```', [said("Yes.\n"), USE], "tool_use"),
        # The answer was cut within a call.
        (f"So: {CUT}", [said("So: "), {**USE, "input": {}}], "max_tokens"),
        (f'{CUT}ne": "utc", "at": 1, "x": {{"y": ["z', [CUT_USE], "max_tokens"),
        (f"So: {CUT[:20]}", [said("So: ")], "max_tokens"),
        ("<think>I th", [thought("I th")], "max_tokens"),
    ],
)
def test_a_stream_gathers_to_the_whole_answer_wherever_it_is_cut_in_pieces(
    serve: Serve, text: str, blocks: list[dict[str, Any]], reason: str
) -> None:
    served = serve(template=HYBRID)
    finish = FinishReason.LENGTH if reason == "max_tokens" else FinishReason.STOP
    for pieces in (list(text) or [""], *([text[:at], text[at:]] for at in range(0, len(text), 3))):
        served.engine.script = says(*pieces, finish=finish)
        body = {"tools": TOOLS, "max_tokens": len(pieces)}
        whole = without_ids(ask(served, **body))
        assert (whole["content"], whole["stop_reason"]) == (blocks, reason)
        assert without_ids(gathered(streamed(served, **body))) == whole
        for record in (served.telemetry.next_record(), served.telemetry.next_record()):
            assert record.tool_calls.get(ToolCallOutcome.CALLED, 0) == blocks.count(USE)
            assert record.answer_reasons == (reason,)


@pytest.mark.parametrize(
    ("script", "max_tokens", "expected"),
    [
        (says("a", "b", finish=FinishReason.LENGTH), 2, ("max_tokens", None)),
        (says("a", "b", finish=FinishReason.LENGTH), 3, ("model_context_window_exceeded", None)),
        (says("a", stop_reason="END"), 9, ("stop_sequence", "END")),
        (says("a", stop_reason=7), 9, ("end_turn", None)),
        (says(CALL, stop_reason="END"), 9, ("tool_use", None)),
    ],
)
def test_the_reason_why_it_stops(serve: Serve, script: Any, max_tokens: int, expected: tuple[str, str | None]) -> None:
    served = serve(template=HYBRID, script=script)
    body = {"max_tokens": max_tokens, "tools": TOOLS}
    for answer in (ask(served, **body), gathered(streamed(served, **body))):
        assert (answer["stop_reason"], answer["stop_sequence"]) == expected


def test_reasoning_is_left_out_where_it_is_not_to_be_shown(serve: Serve) -> None:
    served = serve(template=HYBRID, script=says(*THOUGHT))
    answer = ask(served, thinking={"type": "adaptive", "display": "omitted"})
    assert answer["content"] == [said("Yes.")]
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": 7}


def test_a_broken_call_is_text_and_a_stream_that_has_begun_it_asks_for_no_call(serve: Serve) -> None:
    broken = BROKEN.replace("utc", "x")
    served = serve(template=HYBRID, script=says(*f"{CALL} {broken} end"))
    whole = without_ids(ask(served, tools=TOOLS))
    assert (whole["content"], whole["stop_reason"]) == ([USE, said(f" {broken} end")], "tool_use")
    message = without_ids(gathered(streamed(served, tools=TOOLS)))
    assert message["content"] == [USE, {**USE, "input": {}}, said("x}}\n</tool_call> end")]
    assert message["stop_reason"] == "end_turn"


def test_a_forced_call_is_always_told_as_one(serve: Serve) -> None:
    served = serve(template=CHATML, script=says(CALL))
    answer = ask(served, tools=TOOLS, tool_choice=tool("get_time"))
    assert (without_ids(answer)["content"], answer["stop_reason"]) == ([USE], "tool_use")
    served.engine.script = says(CUT, finish=FinishReason.LENGTH)
    answer = ask(served, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=1)
    assert (without_ids(answer)["content"], answer["stop_reason"]) == ([{**USE, "input": {}}], "max_tokens")
    served.engine.script = says(CUT[:20], finish=FinishReason.LENGTH)
    assert ask(served, tools=TOOLS, tool_choice={"type": "any"})["content"] == []
    answer = ask(served, tools=TOOLS, tool_choice=tool("get_time"))
    assert without_ids(answer)["content"] == [{**USE, "input": {}}]
    served.engine.script = says("", finish=FinishReason.LENGTH)
    assert ask(served, tools=TOOLS, tool_choice=tool("get_time"), max_tokens=0)["content"] == []


def stream_shape() -> MessagesShape:
    """Return the shape of a stream with calls."""
    tools = Tools((), {"get_time": {}}, "auto", only_one=False)
    calls = dialect_of("hermes", "none", ChatTemplate("{{ messages }}", {}), {})
    return MessagesShape(
        Head("msg_1", 0, "demo", ""),
        Wanted(1, None, None, False, False, False, False, False),
        Conversation(calls, tools, {}, is_constrained=False),
        AnswerFacts(),
        reuse=PromptReuse(),
        max_tokens=64,
        shows_reasoning=True,
        stream=True,
    )


def test_the_input_of_a_call_is_streamed_as_it_is_written() -> None:
    shape = stream_shape()
    inputs = [
        shape.delta(TokenChunk("1", 0, piece, [1], None, None, None)).count(b"input_json_delta") for piece in PIECES
    ]
    assert inputs == [0, 0, 1, 1, 0, 0]


def test_the_number_of_tokens_never_falls_within_a_stream() -> None:
    shape = stream_shape()
    texts = [*shape.prompt(PromptDone("1", 0, [1, 2, 3], None, RequestTimes())), shape.activity()]
    for piece in ("a", "b"):
        shape.delta(TokenChunk("1", 0, piece, [1], None, None, None))
        texts.append(shape.activity())
    assert [re.search(rb'"output_tokens":(\d+)', text)[1] for text in texts] == [b"1", b"1", b"1", b"2"]
