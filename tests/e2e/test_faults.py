"""What breaks, what it costs, and what it does not: a part fails for one request, a client leaves, the engine dies.

Whatever it is, each request has one record, those beside it get exactly the tokens they would have had, and nothing of
it stays behind: `House.check_the_rest_is_well` proves that for every row. All the while, a consumer of telemetry fails
on every record.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oaiserve.errors import APIError, InternalError, InvalidRequest, Unavailable
from oaiserve.record import Outcome
from tests.e2e.house import BAD_LOGITS, House, Panic, alphabet, events_of, open_house, texts_in, wait_until
from tests.e2e.raw_client import enter, read_events
from tests.engine.doubles import TIMEOUT_SECONDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAYS = pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])

# -- a part breaks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What breaks, by the prompt that makes it break; the phase that the request ends in; what the client is told.
    `texts` is what it has had before, if it streams: of each choice."""

    prompt: str
    phase: str
    error: type[APIError]
    says: str
    texts: tuple[str, ...] | None = None
    outcome: Outcome = Outcome.FAILED
    path: str = COMPLETIONS
    n: int = 1
    whole: bool = True  # it can break for an answer that is no stream, too

    def asks(self) -> dict[str, Any]:
        is_chat = self.path == CHAT
        prompt = {"messages": [{"role": "user", "content": self.prompt}]} if is_chat else {"prompt": self.prompt}
        return {"path": self.path, "n": self.n, "max_tokens": 9, **prompt}


TOKENIZING = "The server failed while it tokenized this request"
TEMPLATE = "The model's chat template rejects these messages"
OUTPUT = "The server failed on this request's output"
REJECTED, TWO = Outcome.REJECTED, ("abcd", "ab")  # of two choices, the second waits until the prompt is computed

FAULTS = [
    Fault("tokenizer raises", "tokenize", InternalError, TOKENIZING),
    Fault("tokenizer panics", "tokenize", InternalError, TOKENIZING),
    Fault("template refuses", "tokenize", InvalidRequest, f"{TEMPLATE}: No such talk.", None, REJECTED, CHAT),
    Fault("template has a bug", "tokenize", InvalidRequest, TEMPLATE, None, REJECTED, CHAT),
    Fault("bad logits at once", "prefill", InternalError, BAD_LOGITS),
    Fault("bad logits", "decode", InternalError, BAD_LOGITS, ("ab",)),
    Fault("output raises at once", "decode", InternalError, OUTPUT),
    Fault("output raises", "decode", InternalError, OUTPUT, ("ab",)),
    Fault("output panics", "decode", InternalError, OUTPUT, ("ab",)),
    Fault("output of one choice raises", "decode", InternalError, OUTPUT, TWO, n=2),
    Fault(
        "taker raises", "decode", InternalError, "lost a part", ("ab",), whole=False
    ),  # a whole answer is taken at its end
]
CASES = [(fault, stream) for fault in FAULTS for stream in ((True, False) if fault.whole else (True,))]


@pytest.mark.parametrize(("fault", "stream"), CASES, ids=[f"{f.prompt}-{'stream' if s else 'whole'}" for f, s in CASES])
def test_a_part_that_breaks_costs_one_request(fault: Fault, stream: bool) -> None:
    with open_house() as house:
        asked = house.ask("victim", stream=stream, **fault.asks())
        house.run_until(asked.done)
        answer = asked.result()
        house.check_the_rest_is_well()
        record = house.record("victim")
    check_told(answer, fault.error, fault.says, fault.texts if stream else None)
    assert (record.outcome, record.error_type) == (fault.outcome, fault.error.__name__)
    assert (record.http_status, record.times.phases()[-1].name) == (answer.status_code, fault.phase)


@WAYS
def test_an_answer_that_cannot_be_rendered_costs_one_request(stream: bool) -> None:
    with open_house() as house:
        asked = house.ask("victim", prompt="rendering raises", stream=stream, max_tokens=9)
        house.run_until_in_step("rendering raises")
        house.run_steps(1 if stream else 9)
        answer = asked.result()
        if stream:
            house.wait_for_abort()
        house.check_the_rest_is_well()
        record = house.record("victim")
    check_told(answer, InternalError, "Its log says why", () if stream else None)
    assert (record.outcome, record.error_type) == (Outcome.FAILED, "InternalError")
    assert (record.http_status, record.completion_tokens) == ((200, 2) if stream else (500, 9))


def check_told(answer: httpx.Response, error: type[APIError], says: str, texts: tuple[str, ...] | None) -> None:
    """By an error event after those texts of a stream; None: as the whole answer."""
    if texts is not None:
        *chunks, told, done = events_of(answer)
        assert (answer.status_code, tuple(texts_in(chunks)), done) == (200, texts, "[DONE]")
    else:
        assert answer.status_code == error.status
        told = answer.text
    told = json.loads(told)["error"]
    assert (told["type"], told["code"], says in told["message"]) == (error.type, error.code, True)


# -- the client leaves ------------------------------------------------------------------------------------------------


def while_it_sends_its_body(house: House, **fields: Any) -> None:
    enter(house.url, body_bytes=9, prompt="victim", **fields).close()


def while_it_waits_for_the_tokenizer(house: House, **fields: Any) -> None:
    house.accompany_later()  # it keeps the only worker busy
    client = enter(house.url, prompt="victim", **fields)
    wait_until(lambda: house.engine.snapshot().num_tokenizing == 1)
    house.leave(client)


def while_it_is_tokenized(house: House, **fields: Any) -> None:
    client = enter(house.url, prompt="victim blocks", **fields)
    assert house.tokenizer.entered.wait(TIMEOUT_SECONDS)
    house.leave(client)


def while_it_is_queued(house: House, **fields: Any) -> None:
    house.accompany(n=2)  # now no place is left
    client = enter(house.url, prompt="victim", **fields)
    house.run_until(lambda: house.engine.snapshot().num_waiting == 1)
    house.leave(client)


def while_its_prompt_is_computed(house: House, **fields: Any) -> None:
    client = enter(house.url, prompt="victim" * 20, **fields)
    house.run_until_in_step("victim" * 20)
    house.run_steps(2)
    house.leave(client)


def before_its_first_token(house: House, **fields: Any) -> None:
    client = enter(house.url, prompt="victim", **fields)
    house.run_until_in_step("victim")
    house.leave(client)


def between_two_tokens(house: House, **fields: Any) -> None:
    client = enter(house.url, prompt="victim", **fields)
    house.run_until_in_step("victim")
    house.run_steps(3)
    house.leave(client)


def with_its_tokens_unread(house: House, **fields: Any) -> None:
    """Far more than the buffers hold, and more are to come."""
    client = enter(house.url, prompt="victim", logprobs=1, **fields)
    house.run_until_in_step("victim")
    house.run_steps(300)
    if fields["stream"]:
        wait_until(house.is_writing_paused)
    house.leave(client)


def with_its_answer_unread(house: House, **fields: Any) -> None:
    """The same, but the last token is there."""
    num_streams = len(house.streams)
    client = enter(house.url, prompt="victim" * 500, **fields | {"echo": True, "logprobs": 1, "max_tokens": 1})
    wait_until(lambda: len(house.streams) > num_streams)
    house.run_until(lambda: len(house.streams) == num_streams)
    wait_until(house.is_writing_paused)
    client.close()


MOMENTS = [
    (while_it_sends_its_body, "receive"),
    (while_it_waits_for_the_tokenizer, "tokenize_wait"),
    (while_it_is_tokenized, "tokenize"),
    (while_it_is_queued, "queue"),
    (while_its_prompt_is_computed, "prefill"),
    (before_its_first_token, "decode"),  # as far as it has come when it is told: a step is not interrupted
    (between_two_tokens, "decode"),
    (with_its_tokens_unread, "decode"),
    (with_its_answer_unread, "respond"),
]


@pytest.mark.parametrize(("leave", "phase"), MOMENTS, ids=[leave.__name__ for leave, _ in MOMENTS])
@WAYS
def test_a_client_that_leaves_leaves_nothing_behind(leave: Callable[..., None], phase: str, stream: bool) -> None:
    with open_house() as house:
        leave(house, request_id="victim", max_tokens=5000, stream=stream)
        house.run_steps(1)
        record = house.record("victim")
        house.check_the_rest_is_well()
    assert (record.outcome, record.times.phases()[-1].name) == (Outcome.CANCELLED, phase)
    assert sum(phase.duration_ns for phase in record.times.phases()) == record.times.duration_ns


MESSAGES = [{"role": "user", "content": "victim"}]
STREAMS = {  # of five tokens: how many events each of them brings, and then the end
    COMPLETIONS: ({"prompt": "victim"}, (1, 1, 1, 1, 1)),
    CHAT: ({"messages": MESSAGES}, (2, 1, 1, 1, 2)),
}


@pytest.mark.parametrize(
    ("path", "num_read"), [(path, k) for path, (_, brought) in STREAMS.items() for k in range(sum(brought) + 2)]
)
def test_a_client_may_leave_after_any_event(path: str, num_read: int) -> None:
    asks, brought = STREAMS[path]
    with open_house() as house:
        client = enter(house.url, path, request_id="victim", max_tokens=5, stream=True, **asks)
        house.run_until_in_step("victim")
        num_tokens = 0
        with client.makefile("rb") as events:
            while num_tokens == 0 or (num_tokens < 5 and sum(brought[:num_tokens]) < num_read):
                house.run_steps(1)
                num_tokens += 1
                read_events(events, min(num_read, sum(brought[:num_tokens])) - sum(brought[: num_tokens - 1]))
            read_events(events, num_read - sum(brought[:num_tokens]))
        if num_tokens < 5:
            house.leave(client)
        else:  # the rest is on its way already
            client.close()
        house.run_steps(1)
        record = house.record("victim")
        house.check_the_rest_is_well()
    assert record.outcome is (Outcome.CANCELLED if num_tokens < 5 else Outcome.FINISHED)
    assert record.completion_tokens == min(5, num_tokens + 1)  # with that of the step that was under way
    assert record.times.phases()[-1].name == ("decode" if num_tokens < 4 else "respond")


def test_one_that_leaves_does_not_disturb_the_next() -> None:
    with open_house() as house:
        while_its_prompt_is_computed(house, request_id="victim")
        asked = house.ask("next", prompt="next", max_tokens=5)
        house.run_until(asked.done)
        assert asked.result().json()["choices"][0]["text"] == "abcde"
        assert house.record("victim").outcome is Outcome.CANCELLED
        assert house.record("next").outcome is Outcome.FINISHED
        house.check_the_rest_is_well()


# -- the engine dies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), Panic("a panic below")], ids=["raise", "panic"])
def test_when_a_step_raises_everybody_is_told_and_nobody_is_taken(error: BaseException) -> None:
    with open_house() as house:
        house.accompany(n=2)  # now no place is left
        asked = house.companions | {"queued": house.ask("queued", prompt="queued", stream=True)}
        house.run_until(lambda: house.engine.snapshot().num_waiting == 1)
        asked["tokenized"] = house.ask("tokenized", prompt="this blocks")
        assert house.tokenizer.entered.wait(TIMEOUT_SECONDS)
        house.runner.error = error
        house.runner.permit()
        streamed, *others = [future.result() for future in asked.values()]
        (text,) = texts_in(events_of(streamed)[:-2])
        records = [house.record(request_id) for request_id in asked]
        house.tokenizer.release.set()
        assert house.server.has_ended.wait(TIMEOUT_SECONDS)
        late = {path: asyncio.run(ask_app(house, path)) for path in ("/ready", "/health", COMPLETIONS)}
        left = house.engine.snapshot()
        assert (left.blocks_used, left.num_running, left.num_waiting, len(house.streams)) == (0, 0, 0, 0)
    says = "The engine has stopped after an internal error"
    check_told(streamed, InternalError, says, (alphabet(len(text)),))
    for answer in others:
        check_told(answer, InternalError, says, None)
    assert text
    assert [record.http_status for record in records] == [200, 500, 500, 500, 500]
    assert {(record.outcome, record.error_type) for record in records} == {(Outcome.FAILED, "InternalError")}
    for answer in late.values():
        check_told(answer, Unavailable, "", None)


async def ask_app(house: House, path: str) -> httpx.Response:
    """Without the server around it, which ends as soon as it sees that the engine has."""
    transport = httpx.ASGITransport(house.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as http:
        return await (http.post(path, json={"prompt": "Hi"}) if path == COMPLETIONS else http.get(path))
