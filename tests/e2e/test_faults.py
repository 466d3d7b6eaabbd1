"""Tests what a failure costs: a part fails for one request, a client disconnects, or the engine fails.

In each case every request has one record, other requests get the same tokens as without the failure, and nothing of the
failed request is left. `Harness.check_no_side_effects` checks that.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oaiserve.errors import APIError, InternalError, InvalidRequest, Unavailable
from oaiserve.facts.record import Outcome
from tests.e2e.harness import BAD_LOGITS, Harness, Panic, alphabet, events_of, running_harness, texts_in
from tests.e2e.raw_client import send_request
from tests.world.serving import Place

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WAYS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])

# -- a part fails -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A failure: the prompt that triggers it, and how the request ends."""

    prompt: str
    phase: str  # the last one of the request
    error: type[APIError]
    message: str  # a part of the error message
    texts: tuple[str, ...] | None = None  # text of each choice that a stream has sent before the error
    outcome: Outcome = Outcome.FAILED
    path: str = COMPLETIONS
    n: int = 1
    whole: bool = True  # it can fail for an answer that is no stream, too

    def body_and_path(self) -> dict[str, Any]:
        is_chat = self.path == CHAT
        prompt = {"messages": [{"role": "user", "content": self.prompt}]} if is_chat else {"prompt": self.prompt}
        return {"path": self.path, "n": self.n, "max_tokens": 9, **prompt}


TOKENIZING = "The server failed while it read or tokenized this request"
TEMPLATE = "The model's chat template rejects these messages"
OUTPUT = "The server failed on this request's output"
REJECTED = Outcome.REJECTED
# The second choice waits until the prompt is computed.
TWO = ("abcd", "ab")

FAULTS = [
    Fault("tokenizer raises", "tokenize", InternalError, TOKENIZING),
    Fault("tokenizer panics", "tokenize", InternalError, TOKENIZING),
    Fault("template refuses", "tokenize", InvalidRequest, f"{TEMPLATE}: Unknown role.", None, REJECTED, CHAT),
    Fault("template has a bug", "tokenize", InvalidRequest, TEMPLATE, None, REJECTED, CHAT),
    Fault("bad logits at once", "prefill", InternalError, BAD_LOGITS),
    Fault("bad logits", "decode", InternalError, BAD_LOGITS, ("ab",)),
    Fault("output raises at once", "decode", InternalError, OUTPUT),
    Fault("output raises", "decode", InternalError, OUTPUT, ("ab",)),
    Fault("output panics", "decode", InternalError, OUTPUT, ("ab",)),
    Fault("output of one choice raises", "decode", InternalError, OUTPUT, TWO, n=2),
    # The events of a whole answer are received together, at its end.
    Fault("receiver raises", "decode", InternalError, "lost a part", ("ab",), whole=False),
]
CASES = [(fault, stream) for fault in FAULTS for stream in ((True, False) if fault.whole else (True,))]


@pytest.mark.parametrize(("fault", "stream"), CASES, ids=[f"{f.prompt}-{'stream' if s else 'whole'}" for f, s in CASES])
def test_a_failing_part_fails_only_one_request(place: Place, fault: Fault, stream: bool) -> None:
    with running_harness(place) as harness:
        victim = harness.ask("victim", stream=stream, **fault.body_and_path())
        harness.run_until(victim.done)
        answer = victim.result()
        harness.check_no_side_effects()
        record = harness.record("victim")
    check_error(answer, fault.error, fault.message, fault.texts if stream else None)
    assert (record.outcome, record.error_type) == (fault.outcome, fault.error.__name__)
    assert (record.http_status, record.times.phases()[-1].name) == (answer.status_code, fault.phase)


@WAYS
def test_an_answer_that_cannot_be_rendered_fails_only_its_request(place: Place, stream: bool) -> None:
    with running_harness(place) as harness:
        victim = harness.ask("victim", prompt="rendering raises", stream=stream, max_tokens=9)
        harness.run_until_in_step("rendering raises")
        harness.run_steps(1 if stream else 9)
        answer = victim.result()
        if stream:
            harness.wait_for_abort()
        harness.check_no_side_effects()
        record = harness.record("victim")
    check_error(answer, InternalError, "Its log says why", () if stream else None)
    assert (record.outcome, record.error_type) == (Outcome.FAILED, "InternalError")
    # The abort takes effect in the step after the first token, or before it.
    assert (record.http_status, record.completion_tokens) in ([(200, 1), (200, 2)] if stream else [(500, 9)])


def check_error(answer: httpx.Response, error: type[APIError], message: str, texts: tuple[str, ...] | None) -> None:
    """Check that the answer is this error or, with `texts`, a stream of these texts that ends in an error event."""
    if texts is not None:
        *chunks, content, done = events_of(answer)
        assert (answer.status_code, tuple(texts_in(chunks)), done) == (200, texts, "[DONE]")
    else:
        assert answer.status_code == error.status
        content = answer.text
    details = json.loads(content)["error"]
    assert (details["type"], details["code"]) == (error.type, error.code)
    assert message in details["message"]


# -- the client disconnects -------------------------------------------------------------------------------------------


def while_it_sends_its_body(harness: Harness, **fields: Any) -> None:
    send_request(harness, body_bytes=9, prompt="victim", **fields).close()


def while_it_waits_for_the_tokenizer(harness: Harness, **fields: Any) -> None:
    harness.start_companion_in_tokenizer()
    client = send_request(harness, prompt="victim", **fields)
    harness.settle()
    assert harness.engine.snapshot().num_tokenizing == 1
    harness.disconnect(client)


def while_it_is_tokenized(harness: Harness, **fields: Any) -> None:
    client = send_request(harness, prompt="victim blocks", **fields)
    harness.tokenizer.entered.wait()
    harness.disconnect(client)


def while_it_is_queued(harness: Harness, **fields: Any) -> None:
    harness.start_companion()
    harness.start_companion()  # now the batch is full
    client = send_request(harness, prompt="victim", **fields)
    harness.run_until(lambda: harness.engine.snapshot().num_waiting == 1)
    harness.disconnect(client)


def while_its_prompt_is_computed(harness: Harness, **fields: Any) -> None:
    client = send_request(harness, prompt="victim" * 20, **fields)
    harness.run_until_in_step("victim" * 20)
    harness.run_steps(2)
    harness.disconnect(client)


def before_its_first_token(harness: Harness, **fields: Any) -> None:
    client = send_request(harness, prompt="victim", **fields)
    harness.run_until_in_step("victim")
    harness.disconnect(client)


def with_its_tokens_unread(harness: Harness, **fields: Any) -> None:
    """Disconnect when more tokens are ready than the buffers hold, and the engine still decodes."""
    client = send_request(harness, prompt="victim", logprobs=1, **fields)
    harness.run_until_in_step("victim")
    harness.run_steps(300)
    harness.settle()
    assert harness.is_writing_paused() is fields["stream"]
    harness.disconnect(client)


def with_its_answer_unread(harness: Harness, **fields: Any) -> None:
    """Disconnect when the engine has finished, and the answer is larger than the buffers."""
    num_streams = len(harness.streams)
    client = send_request(harness, prompt="victim" * 500, **fields | {"echo": True, "logprobs": 1, "max_tokens": 1})
    harness.settle()
    assert len(harness.streams) > num_streams
    harness.run_until(lambda: len(harness.streams) == num_streams)
    assert harness.is_writing_paused()
    client.close()


MOMENTS = [
    (while_it_sends_its_body, "receive"),
    (while_it_waits_for_the_tokenizer, "tokenize_wait"),
    (while_it_is_tokenized, "tokenize"),
    (while_it_is_queued, "queue"),
    (while_its_prompt_is_computed, "prefill"),
    (before_its_first_token, "decode"),  # the abort takes effect after the step, which is not interrupted
    (with_its_tokens_unread, "decode"),
    (with_its_answer_unread, "respond"),
]


@pytest.mark.parametrize(("disconnect", "phase"), MOMENTS, ids=[disconnect.__name__ for disconnect, _ in MOMENTS])
@WAYS
def test_a_disconnect_leaves_nothing_behind(
    place: Place, disconnect: Callable[..., None], phase: str, stream: bool
) -> None:
    with running_harness(place) as harness:
        disconnect(harness, request_id="victim", max_tokens=5000, stream=stream)
        harness.run_steps(1)
        record = harness.record("victim")
        harness.check_no_side_effects()
    assert (record.outcome, record.times.phases()[-1].name) == (Outcome.CANCELLED, phase)
    assert sum(phase.duration_ns for phase in record.times.phases()) == record.times.duration_ns


# -- the engine fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), Panic("a panic below")], ids=["raise", "panic"])
def test_an_error_in_a_step_ends_all_requests_and_refuses_new_ones(place: Place, error: BaseException) -> None:
    with running_harness(place) as harness:
        harness.start_companion()
        harness.start_companion()  # now the batch is full
        open_requests = harness.companions | {"queued": harness.ask("queued", prompt="queued", stream=True)}
        harness.run_until(lambda: harness.engine.snapshot().num_waiting == 1)
        open_requests["tokenized"] = harness.ask("tokenized", prompt="this blocks")
        harness.tokenizer.entered.wait()
        harness.runner.error = error
        harness.runner.permit()
        streamed, *others = [future.result() for future in open_requests.values()]
        (text,) = texts_in(events_of(streamed)[:-2])
        records = [harness.record(request_id) for request_id in open_requests]
        harness.tokenizer.release.set()
        harness.server.wait_for_end()
        late = [harness.server.process.run(ask_app, harness, path) for path in ("/ready", "/health", COMPLETIONS)]
        harness.settle()
        assert harness.telemetry.next_record().error_type == "Unavailable"
        left = harness.engine.snapshot()
        assert (left.blocks_used, left.num_running, left.num_waiting, len(harness.streams)) == (0, 0, 0, 0)
    message = "The engine has stopped after an internal error"
    check_error(streamed, InternalError, message, (alphabet(len(text)),))
    for answer in others:
        check_error(answer, InternalError, message, None)
    assert text
    assert [record.http_status for record in records] == [200] + 5 * [500]
    assert {(record.outcome, record.error_type) for record in records} == {(Outcome.FAILED, "InternalError")}
    for task in late:
        check_error(task.result(), Unavailable, "", None)


async def ask_app(harness: Harness, path: str) -> httpx.Response:
    """Call the app without its HTTP server, which stops soon after the engine."""
    transport = httpx.ASGITransport(harness.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        return await (http.post(path, json={"prompt": "Hi"}) if path == COMPLETIONS else http.get(path))
