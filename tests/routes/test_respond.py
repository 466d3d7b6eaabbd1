"""Tests the ways in which a request can end: the answer that the client gets, and the one record."""

import asyncio
import gc
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import httpx
import pytest
from backports import zstd
from opentelemetry import trace as otel
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from oaiserve.app import create_app
from oaiserve.config import Bytes, Config, ServerOptions
from oaiserve.engine.request import TextPrompt, TokenChunk
from oaiserve.errors import ContextLengthExceeded, InternalError, InvalidRequest, Overloaded, RequestTimeout
from oaiserve.facts.record import Outcome
from oaiserve.facts.trace import TraceContext
from oaiserve.http.fair_turns import MUCH_BYTES, CpuTime
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.routes.answer.respond import PIECE_BYTES, write
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake.receive import read_body
from tests.missing_plugins import is_served
from tests.routes.asking import BODIES, refused
from tests.routes.doubles import FakeEngine, FakeTelemetry, Script, fails, says, starts
from tests.serving import Serve, Served
from tests.world.loop import World
from tests.world.serving import Place

# Requests that finish.


@pytest.mark.parametrize("stream", [False, True])
def test_the_record_has_the_facts_of_the_request_and_of_its_answer(served: Served, stream: bool) -> None:
    response = served.complete(stream=stream, n=2, temperature=0.5, stop=["secret"])
    record = served.telemetry.next_record()
    assert record.request_id == response.headers["x-request-id"]
    assert (record.outcome, record.http_status, record.error_type) == (Outcome.FINISHED, 200, None)
    assert (record.operation, record.http_route) == ("text_completion", "/v1/completions")
    assert (record.model, record.stream) == ("org/demo", stream)
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (3, 2, 4)
    assert record.finish_reasons == ("stop", "stop")
    assert record.params == {"n": 2, "temperature": 0.5}


@pytest.mark.parametrize("stream", [False, True])
def test_the_record_of_a_stream_has_its_events_and_no_other_record_has(served: Served, stream: bool) -> None:
    served.complete(stream=stream, n=2)
    record = served.telemetry.next_record()
    assert sum(record.event_tokens) == (record.completion_tokens if stream else 0)
    assert len(record.event_gaps_ns) == max(0, len(record.event_tokens) - 2)


def test_events_are_those_that_the_client_sees_with_the_tokens_since_the_last_one() -> None:
    clock = iter([5, 7, 30, 1000])
    noted = Exchange("r", "u", TraceContext(1, 2), "client", clock.__next__)
    for choice, num_tokens, is_seen in (0, 1, True), (1, 1, True), (0, 3, False), (0, 2, True), (1, 8, True):
        noted.streamed(TokenChunk("r", choice, "", [0] * num_tokens, None), is_seen=is_seen)
    assert list(noted.event_tokens) == [1, 1, 5, 8]
    assert list(noted.event_gaps_ns) == [25, 993]


def test_a_stream_asks_proxies_not_to_buffer_it(served: Served) -> None:
    headers = served.chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


def test_two_requests_with_the_same_id_get_different_answer_ids(served: Served) -> None:
    headers = {"x-request-id": "same"}
    answers = [served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers).json() for _ in range(2)]
    assert answers[0]["id"] != answers[1]["id"]
    assert [served.telemetry.next_record().request_id for _ in range(2)] == ["same", "same"]


def test_the_documented_client_sends_the_trace_of_its_current_span(served_on_a_port: Served) -> None:
    page = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
    section = page.split("### A trace that begins in your client")[1]
    code = section.split("```python\n")[1].split("```")[0].replace("http://127.0.0.1:8000", served_on_a_port.url)
    documented: dict[str, Any] = {}
    exec(code, documented)
    span = otel.NonRecordingSpan(otel.SpanContext(0xABC, 5, False, otel.TraceFlags(1)))
    with otel.use_span(span), documented["client"] as client:
        client.completions.create(model="org/demo", prompt="Hi")
    trace = served_on_a_port.telemetry.next_record().trace
    assert (trace.trace_id, trace.parent_span_id, trace.parent_sampled) == (0xABC, 5, True)


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"temperature": 3}])
def test_an_answer_says_that_its_trace_is_sampled_if_its_spans_are_exported(served: Served, fields: dict) -> None:
    headers = {"traceparent": f"00-{0xABC:032x}-{5:016x}-00"}
    served.telemetry.sampled_traces.add(0xABC)
    response = served.http.post("/v1/completions", json={"prompt": "Hi", **fields}, headers=headers)
    assert response.headers["traceresponse"].endswith("-01")
    without_spans = served.http.get("/v1/models", headers=headers)
    assert without_spans.headers["traceresponse"].endswith("-00")


# Errors before and after the status line.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "name", "details"),
    [
        ("/v1/completions", "max_tokens", "completion_tokens_details"),
        ("/v1/chat/completions", "max_completion_tokens", "completion_tokens_details"),
        ("/v1/responses", "max_output_tokens", "output_tokens_details"),
        ("/v1/messages", "max_tokens", "output_tokens_details"),
    ],
)
def test_more_tokens_than_the_context_has_are_cut_and_told(
    served: Served, path: str, name: str, details: str, stream: bool
) -> None:
    for wanted, shown in ((4093, None), (4094, 4093)):  # the context has 4,096 tokens, the prompt 3
        options = {"stream_options": {"include_usage": True}} if stream else {}
        response = served.post(path, **BODIES[path] | {name: wanted}, stream=stream, **options)
        assert response.headers.get("x-max-tokens-cut-to") == (None if shown is None else f"{shown}")
        answer = last_usage(response.text) if stream else response.json()["usage"]
        assert (answer.get(details) or {}).get("max_tokens_cut_to") == shown


def last_usage(text: str) -> dict[str, Any]:
    """Return the last usage in the events of a stream."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    usages = [event.get("response", event).get("usage") for event in events]
    return next(usage for usage in reversed(usages) if usage)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "param"), [("/v1/completions", "prompt"), ("/v1/responses", "input")])
def test_a_failure_before_the_first_token_is_an_http_error(served: Served, path: str, param: str, stream: bool) -> None:
    served.engine.script = fails(ContextLengthExceeded(8, 9, param=param))
    response = served.post(path, **BODIES[path], stream=stream)
    refused(response, param, f"your {param} resulted in 9 tokens", code="context_length_exceeded")
    record = served.telemetry.next_record()
    assert (record.outcome, record.error_type) == (Outcome.REJECTED, "ContextLengthExceeded")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_engine_answers_429_with_retry_after(served: Served, stream: bool) -> None:
    served.engine.submit_error = Overloaded("1024 requests are waiting.", retry_after_seconds=3)
    response = served.complete(stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    record = served.telemetry.next_record()
    assert (record.outcome, record.http_status, record.times.submitted) == (Outcome.REJECTED, 429, None)


def test_a_500_asks_the_sdk_not_to_retry(served: Served) -> None:
    served.engine.script = fails(InternalError("The step failed."), "Hel")
    response = served.complete()
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert served.telemetry.next_record().outcome == Outcome.FAILED


def test_an_unexpected_error_is_logged_and_not_shown(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object) -> Iterator[list[object]]:
        raise ZeroDivisionError("a secret")

    served.engine.script = broken
    response = served.complete()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert "a secret" in caplog.text
    assert served.telemetry.next_record().outcome == Outcome.FAILED


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_request_is_refused_for_now_if_the_system_has_nothing_left_for_it(
    served: Served, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def broken(request: object) -> Iterator[list[object]]:
        raise error

    served.engine.script = broken
    response = served.complete()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")
    assert "no memory, or no thread" in response.json()["error"]["message"]
    assert repr(error) in caplog.text
    assert "Traceback" not in caplog.text


def test_a_refused_request_was_received_but_never_submitted(served: Served) -> None:
    served.complete(temperature=3)
    record = served.telemetry.next_record()
    assert (record.outcome, record.http_status, record.error_type) == (Outcome.REJECTED, 400, "InvalidRequest")
    assert record.error_param == "temperature"
    assert [phase.name for phase in record.times.phases()] == ["receive"]


def test_a_body_over_the_limit_is_not_read_to_its_end(serve: Serve) -> None:
    served = serve(body_limit=1000)
    parts = (b" " * 100 for _ in range(11))  # without a content-length
    response = served.http.post("/v1/completions", content=parts, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert served.telemetry.next_record().http_status == 413


# Clients that read slowly. tests/e2e/test_slow_readers.py has the tests with a real socket.


@pytest.mark.parametrize("size", [1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_large_body_is_written_in_pieces(size: int) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = bytes(i % 251 for i in range(size))
    asyncio.run(write(send, body, is_last=True))
    assert b"".join(message["body"] for message in sent) == body
    assert max(len(message["body"]) for message in sent) <= PIECE_BYTES
    assert [message["more_body"] for message in sent] == [True] * (len(sent) - 1) + [False]


def test_pieces_of_a_stream_end_with_an_event() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = b"data: %b\n\n" % (b"x" * 20_000) * 7
    asyncio.run(write(send, body))
    pieces = [message["body"] for message in sent]
    assert b"".join(pieces) == body
    assert [piece[-3:] for piece in pieces] == [b"x\n\n"] * 3
    assert max(map(len, pieces)) <= PIECE_BYTES


# A server that shuts down.


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_cut_off_by_the_shutdown_gets_an_error_that_says_so(place: Place, stream: bool) -> None:
    engine = FakeEngine(runtime=place.world)
    telemetry = FakeTelemetry(place.world)
    engine.script = starts("Hel")
    begun: list[httpx.Response] = []

    def ask(http: httpx.Client) -> httpx.Response:
        body = {"prompt": "Hi", "stream": stream}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            begun.append(answer)
            answer.read()
        return answer

    options = ServerOptions(drain_timeout_seconds=0)
    app = create_app(Config("demo"), engine, telemetry, runtime=place.world)
    with place.threads() as threads:
        with place.running(app, options) as url:
            asking = threads.submit(ask, place.plain(url))
            engine.submitted.get()
            place.world.wait_for(lambda: begun or not stream)
        answer = asking.result()
    assert answer.status_code == (200 if stream else 503)
    assert "The server is shutting down." in answer.text
    assert engine.aborted.qsize() == 1
    assert telemetry.next_record().error_type == "Unavailable"
    assert telemetry.closed


async def test_a_shutdown_closes_telemetry_after_an_engine_that_fails_to_stop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(timeout_seconds: float) -> None:
        raise PermissionError("The engine may not stop.")

    engine = FakeEngine(runtime=world)
    telemetry = FakeTelemetry(world)
    app = create_app(Config("demo"), engine, telemetry, runtime=world)
    monkeypatch.setattr(engine, "stop", fail)
    with pytest.raises(PermissionError, match="^The engine may not stop.$"):
        async with app.router.lifespan_context(app):
            assert not telemetry.closed
    assert telemetry.closed


def serving_of(num_bytes: int, **parts: object) -> Any:
    config = Config("demo", ServerOptions(body_limit=Bytes(num_bytes)))
    return SimpleNamespace(config=config, body_limit=num_bytes, received_bytes=SharedLimit(num_bytes), **parts)


def part(body: bytes, more_body: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more_body}


async def read(serving: Any, *messages: Message, client: str = "one", coding: bytes = b"") -> bytearray:
    """Read a body that comes in these messages, after which none comes."""
    never = asyncio.Future[Message]()
    coming = list(messages)

    async def receive() -> Message:
        return coming.pop(0) if coming else await never

    app = SimpleNamespace(state=SimpleNamespace(serving=serving))
    headers = [(b"content-encoding", coding)]
    scope = {"type": "http", "headers": headers, "state": {"client": client, "cpu": CpuTime()}, "app": app}
    return await read_body(Request(scope, receive), serving)


def test_a_body_that_does_not_arrive_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.routes.intake.receive.MOST_SECONDS", 0)
    serving = serving_of(10)
    with pytest.raises(RequestTimeout, match="did not arrive within 0 seconds"):
        asyncio.run(read(serving))
    assert serving.received_bytes.total == 0


@pytest.mark.parametrize(("num_bytes", "expected"), [(MUCH_BYTES, 1), (MUCH_BYTES - 1, 0)])
def test_the_memory_of_a_large_body_that_ends_early_is_given_back(num_bytes: int, expected: int) -> None:
    engine = FakeEngine()
    with pytest.raises(ClientDisconnect):
        asyncio.run(read(serving_of(2**30, engine=engine), part(bytes(num_bytes)), {"type": "http.disconnect"}))
    assert engine.gives_back.qsize() == expected


@pytest.mark.parametrize("stream", [False, True])
def test_the_memory_of_a_large_answer_is_given_back_once_it_is_written(served: Served, stream: bool) -> None:
    served.engine.script = says("a word")
    assert served.complete(stream=stream).status_code == 200
    served.engine.script = says("x" * (MUCH_BYTES + 1))
    assert len(served.complete(stream=stream).content) > MUCH_BYTES
    assert served.engine.gives_back.get()
    assert served.engine.gives_back.empty()


async def test_bodies_that_are_being_received_are_bounded_by_client() -> None:
    serving = serving_of(100)
    slow = [asyncio.create_task(read(serving, part(b" " * 90), client="greedy")) for _ in range(2)]
    done, waiting = await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Overloaded, match="too many large bodies"):
        done.pop().result()
    body = await read(serving, part(b"a" * 25), part(b"b" * 25, more_body=False), client="polite")
    assert body == b"a" * 25 + b"b" * 25
    assert serving.received_bytes.total == 90
    (cancelled,) = waiting
    cancelled.cancel()
    await asyncio.wait(waiting)
    assert serving.received_bytes.total == 0


@pytest.mark.parametrize("num_words", [1, 50_000])
@pytest.mark.parametrize("coding", ["zstd", "gzip"])
def test_a_compressed_body_is_decoded(serve: Serve, coding: str, num_words: int) -> None:
    served = serve(body_limit=400_000)
    compress = zstd.compress if coding == "zstd" else gzip.compress
    headers = {"content-type": "application/json", "content-encoding": coding}

    def post(path: str, body: dict[str, Any]) -> httpx.Response:
        return served.http.post(path, content=compress(json.dumps(body).encode()), headers=headers)

    prompt = "word " * num_words
    assert post("/v1/completions", {"prompt": prompt}).status_code == 200
    assert served.engine.submitted.get().prompts == (TextPrompt(prompt),)
    messages = [{"role": "user", "content": prompt}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/messages": {"model": "org/demo", "messages": messages, "max_tokens": 9},
        "/v1/responses": {"input": prompt},
        "/tokenize": {"prompt": prompt},
        "/v1/messages/count_tokens": {"model": "org/demo", "messages": messages},
    }
    for path in filter(is_served, bodies):
        assert post(path, bodies[path]).status_code == 200
    bomb = post("/v1/completions", {"prompt": " " * 500_000})
    assert (bomb.status_code, "decodes from" in bomb.text) == (413, True)
    damaged = served.http.post("/v1/completions", content=compress(b'{"prompt": "Hi"}')[:-1], headers=headers)
    assert (damaged.status_code, "cut off" in damaged.text) == (400, True)


async def test_decoded_bytes_count_as_received() -> None:
    serving = serving_of(300_000, engine=FakeEngine())
    serving.received_bytes.take("other", 2)
    with pytest.raises(Overloaded, match="too many large bodies"):
        await read(serving, part(gzip.compress(bytes(299_999)), more_body=False), coding=b"gzip")
    assert serving.received_bytes.total == 2


# -- what is kept -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [says("a", "b"), fails(InvalidRequest("no")), fails(InternalError("no"), "a")])
def test_an_ended_request_is_kept_by_nothing(served: Served, stream: bool, script: Script) -> None:
    """A request may have megabytes of prompts. In a circle they would stay until the next collection of garbage."""
    served.engine.script = script
    gc.disable()
    try:
        served.complete(stream=stream)
        served.telemetry.next_record()
        request = served.engine.submitted.get()
        for _ in range(1000):  # the server may not have left the route yet
            kept_by = {type(holder) for holder in gc.get_referrers(request)} - {FrameType}
            if not kept_by:
                break
            served.http.get("/version")
        assert kept_by == set()
    finally:
        gc.enable()
