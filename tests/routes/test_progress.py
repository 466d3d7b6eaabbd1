"""Tests that a stream tells of the progress of a long prompt, in the form of each route."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from oaiserve.engine.request import FinishReason, PromptDone, PromptProgress, Request, TokenChunk, Usage
from oaiserve.errors import InternalError
from oaiserve.facts.times import RequestTimes
from oaiserve.routes.answer.common_shape import ChoicesShape
from tests.missing_plugins import has_plugin
from tests.routes.asking import BODIES, CHAT, CHATML, stream_of
from tests.routes.doubles import failed, finished, says, starts
from tests.serving import Serve, Served

# What the routes send before the first token.
SIGNS = {
    "/v1/completions": [": 20 of 100 prompt tokens"],
    "/v1/chat/completions": [": 20 of 100 prompt tokens"],
    "/v1/responses": ["event: response.created", "event: response.in_progress", ": 20 of 100 prompt tokens"],
    "/v1/messages": ["event: message_start", "event: ping"],
}


def progress(request: Request, num_computed: int) -> PromptProgress:
    return PromptProgress(request.request_id, 100, 20, num_computed, 500_000_000, RequestTimes())


def tokens(request: Request) -> list[Any]:
    done = PromptDone(request.request_id, 0, [1] * 100, None, RequestTimes(), 20)
    return [done, TokenChunk(request.request_id, 0, "Hello", [10], None, FinishReason.STOP)]


@pytest.fixture
def soon(serve: Serve) -> Served:
    """Return a server whose streams begin at once when a prompt is long."""
    served = serve(progress_after_seconds=1e-6, template=CHATML, script=starts())
    return served


@contextmanager
def streaming(served: Served, path: str, headers: dict[str, str] | None = None, **more: Any) -> Iterator[Any]:
    """Ask for a stream. Give the request, once its prompt is long, the answer, and the events that come."""
    request_sent = served.http.build_request(
        "POST", path, json={**BODIES[path], "stream": True, **more}, headers=headers
    )
    served.engine.script = lambda request: [[progress(request, 20)]]
    answer = served.http.send(request_sent, stream=True)
    request = served.engine.submitted.get()
    try:
        yield request, answer, blocks(answer)
    finally:
        answer.close()


def blocks(answer: httpx.Response) -> Iterator[str]:
    """Yield the events of a stream as they come, each as its text."""
    text = ""
    for part in answer.iter_text():
        text += part
        *whole, text = text.split("\n\n")
        yield from whole


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_begins_and_tells_of_its_prompt_before_the_first_token(soon: Served, path: str) -> None:
    with streaming(soon, path) as (request, answer, events):
        assert answer.status_code == 200
        first = [next(events) for _ in SIGNS[path]]
        assert [event.split("\n")[0] for event in first] == SIGNS[path]
        soon.engine.deliver([progress(request, 60)])
        assert next(events) in (": 60 of 100 prompt tokens", 'event: ping\ndata: {"type":"ping"}')
        soon.engine.deliver([*tokens(request), finished(request.request_id, Usage(100, 20, 1))])
        rest = [*events]
    # The answer goes on as it would have begun, and what it has begun with does not come again.
    assert "Hello" in "".join(rest)
    begins = [event.split("\n")[0] for event in rest if event.startswith("event: ")]
    assert not {*SIGNS[path]} & {*begins}
    assert soon.telemetry.next_record().outcome == "finished"


@pytest.mark.parametrize("path", BODIES)
def test_the_events_with_data_are_those_of_a_short_prompt(soon: Served, path: str) -> None:
    def script(request: Request) -> Iterator[list[Any]]:
        yield [*tokens(request), finished(request.request_id, Usage(100, 20, 1))]

    soon.engine.script = script
    short = soon.post(path, **BODIES[path], stream=True).text.split("\n\n")
    soon.engine.submitted.get()
    with streaming(soon, path) as (request, _, events):
        next(events)  # it has begun
        soon.engine.deliver([*tokens(request), finished(request.request_id, Usage(100, 20, 1))])
        long = [next_event for next_event in events if not next_event.startswith((": ", "event: ping"))]
    begun = [event for event in SIGNS[path] if event.startswith("event: ") and "ping" not in event]
    kinds = [event.split("\n")[0][:12] for event in short if event][min(1, len(begun)) :]
    assert [event.split("\n")[0][:12] for event in long if event] == kinds
    numbers = [json.loads(event.split("data: ")[1]).get("sequence_number") for event in long if "DONE" not in event]
    if path == "/v1/responses":
        assert numbers == [*range(1, len(numbers) + 1)]


ACTIVITY = {
    "/v1/completions": {"index": 0, "text": "", "logprobs": None, "finish_reason": None},
    "/v1/chat/completions": {"index": 0, "delta": {}, "logprobs": None, "finish_reason": None},
}


@pytest.fixture
def impatient(soon: Served, monkeypatch: pytest.MonkeyPatch) -> Served:
    """Return a server whose streams never wait with an event that clients count as activity."""
    monkeypatch.setattr(ChoicesShape, "activity_seconds", 0.0)
    for plugin, shape in (("responses", "ResponsesShape"), ("messages", "MessagesShape")):
        if has_plugin(plugin):
            monkeypatch.setattr(f"oaiserve.plugins.{plugin}.shape.{shape}.activity_seconds", 0.0)
    return soon


@pytest.mark.parametrize("path", BODIES)
def test_long_prompts_send_events_that_clients_count_as_activity(impatient: Served, path: str) -> None:
    with streaming(impatient, path) as (request, _, events):
        begun = [next(events) for _ in range(len(SIGNS[path]) + 1)]
        impatient.engine.deliver([progress(request, 60)])
        signs = [data(begun[-1]), *(data(next(events)) for _ in range(2))]
        impatient.engine.deliver([*tokens(request), finished(request.request_id, Usage(100, 20, 1))])
        rest = [data(event) for event in events if "DONE" not in event]
    signs = [sign for sign in signs if sign.get("type") != "ping" and sign]
    assert len(signs) == 2
    if path == "/v1/responses":
        assert {sign["type"] for sign in signs} == {"response.in_progress"}
        numbers = [each["sequence_number"] for each in [*map(data, begun[:2]), *signs, *rest]]
        assert numbers == [*range(len(numbers))]
        assert signs[0]["response"] == data(begun[1])["response"]
    elif path == "/v1/messages":
        usage = data(begun[0])["message"]["usage"]
        assert usage["output_tokens"] == 1
        delta = {"stop_reason": None, "stop_sequence": None}
        assert signs == [{"type": "message_delta", "delta": delta, "usage": usage}] * 2
    else:
        assert [sign["choices"] for sign in signs] == [[ACTIVITY[path]]] * 2
    assert impatient.telemetry.next_record().event_tokens.tolist() == [1]


def data(event: str) -> Any:
    """Return the data of an event, or nothing if it is a comment."""
    return {} if event.startswith(":") else json.loads(event.split("data: ")[1])


TOOL = {"name": "f", "parameters": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", {"type": "function", "function": TOOL}),
        ("/v1/responses", {"type": "function", **TOOL}),
        ("/v1/messages", {"name": "f", "input_schema": {"type": "object"}}),
    ],
)
def test_text_that_is_held_back_sends_such_events_too(impatient: Served, path: str, tool: dict[str, Any]) -> None:
    with streaming(impatient, path, tools=[tool]) as (request, _, events):
        begun = [next(events) for _ in range(len(SIGNS[path]) + 1)]
        done, _ = tokens(request)
        held = [TokenChunk(request.request_id, 0, text, [10], None) for text in ("```json", "\n{")]
        for event in (done, *held):
            impatient.engine.deliver([event])
            while not is_activity(data(begun.append(next(events)) or begun[-1])):
                pass
        end = TokenChunk(request.request_id, 0, "", [10], None, FinishReason.STOP)
        impatient.engine.deliver([end, finished(request.request_id, Usage(100, 20, 3))])
        assert [*events], "the request ends, so that its server need not wait for it"
    assert not any("```" in event for event in begun)


def is_activity(event: dict[str, Any]) -> bool:
    choices = event.get("choices", ())
    return event.get("type") in ("response.in_progress", "message_delta") or [*choices] == [ACTIVITY.get(CHAT)]


def test_chunks_say_how_far_the_prompt_is_where_a_client_asks_for_them(soon: Served) -> None:
    with streaming(soon, "/v1/chat/completions", return_progress=True) as (request, _, events):
        first = json.loads(next(events).removeprefix("data: "))
        soon.engine.deliver([progress(request, 60)])
        second = json.loads(next(events).removeprefix("data: "))
        soon.engine.deliver([*tokens(request), finished(request.request_id, Usage(100, 20, 1))])
        last, *rest = events
        assert rest[-1] == "data: [DONE]"
    assert first["prompt_progress"] == {"total": 100, "cache": 20, "processed": 20, "time_ms": 500}
    # 40 tokens took half a second, and so will the 40 others.
    assert second["prompt_progress"] == {"total": 100, "cache": 20, "processed": 60, "time_ms": 500, "rest_ms": 500}
    last_progress = json.loads(last.removeprefix("data: "))["prompt_progress"]
    assert last_progress | {"time_ms": 0} == {"total": 100, "cache": 20, "processed": 100, "time_ms": 0}
    assert second["choices"] == []
    assert second["id"] == first["id"]


@pytest.mark.parametrize(("path", "options"), [("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2}), (CHAT, {})])
def test_progress_ends_at_the_total_of_all_prompts_however_short_or_cached(
    served: Served, path: str, options: dict[str, Any]
) -> None:
    chunks = stream_of(served, path, return_progress=True, **options)
    (progress,) = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = 3 * len(options.get("prompt", [1]))
    assert (progress["total"], progress["processed"], progress["cache"]) == (total, total, 2)
    assert not any("prompt_progress" in chunk for chunk in stream_of(served, path, **options))


@pytest.mark.parametrize("path", BODIES)
def test_an_error_behind_the_begin_is_an_event(soon: Served, path: str) -> None:
    with streaming(soon, path) as (request, answer, events):
        next(events)
        soon.engine.deliver([failed(request.request_id, InternalError("It broke."), Usage(100, 20, 0))])
        rest = "".join(events)
    assert answer.status_code == 200
    assert "It broke." in rest
    assert soon.telemetry.next_record().outcome == "failed"


@pytest.mark.parametrize("seconds", [0.0, 3600.0])
def test_without_a_long_wait_a_stream_begins_with_its_first_token(serve: Serve, seconds: float) -> None:
    served = serve(progress_after_seconds=seconds)

    def script(request: Request) -> Iterator[list[Any]]:
        yield [progress(request, 20)]
        yield from says("Hello")(request)

    served.engine.script = script
    text = served.chat(stream=True).text
    assert text.startswith("data: ")
    assert "prompt tokens" not in text
    assert served.engine.submitted.get().reports_progress is (seconds > 0)


def test_nothing_is_reported_of_an_answer_that_is_sent_whole(served: Served) -> None:
    served.chat()
    assert not served.engine.submitted.get().reports_progress


@pytest.mark.plugin("messages")
def test_messages_tell_the_tokens_of_the_prompt_at_their_begin(soon: Served) -> None:
    with streaming(soon, "/v1/messages") as (_, _, events):
        usage = json.loads(next(events).split("data: ")[1])["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (80, 20)


def test_a_cut_is_told_in_the_header_of_a_stream_that_begins_before_its_token(soon: Served) -> None:
    with streaming(soon, "/v1/chat/completions", max_tokens=4096) as (_, answer, _):
        assert answer.headers["x-max-tokens-cut-to"] == "3996"
