"""Requests and events are data: they pass between processes by pickle, and nothing writes into them on the way."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from oaiserve import errors
from oaiserve.engine.engine import Engine
from oaiserve.engine.loop import Broken, Stop
from oaiserve.engine.request import Aborted, Event, Failed, Finished, Request
from oaiserve.errors import APIError, ContextLengthExceeded, InvalidRequest, ModelNotFound
from tests.engine.doubles import TIMEOUT_SECONDS, BlockedTokenizer, Inbox, make_engine
from tests.engine.front_end import BLOCKED, described, record_of, requests


def serve(asked: list[Request], submit: Callable[[Engine, Request], None], inbox: Inbox) -> dict[str, list[Event]]:
    """Run the requests until all have ended as they are expected to, and return their events."""
    tokenizer = BlockedTokenizer()
    with make_engine(tokenizer=tokenizer, kv_blocks=64) as engine:  # type: ignore[arg-type]
        for request in asked:
            submit(engine, request)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)
        engine.abort(BLOCKED)
        ended = inbox.wait_terminal(*(request.request_id for request in asked))
        tokenizer.release.set()
    assert {name: type(event) for name, event in ended.items()} == {
        **dict.fromkeys(("text", "ids", "again", "chat", "none"), Finished),
        **dict.fromkeys(("too long", "no words"), Failed),
        BLOCKED: Aborted,
    }
    events: dict[str, list[Event]] = {request.request_id: [] for request in asked}
    for event in (event for hand_over in inbox.hand_overs for event in hand_over):
        events[event.request_id].append(event)
    return events


@pytest.mark.usefixtures("overlap")
def test_a_front_end_in_another_process_makes_the_same_records() -> None:
    command = [sys.executable, "-m", "tests.engine.front_end"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as front_end:
        assert front_end.stdin is not None
        assert front_end.stdout is not None
        asked = pickle.load(front_end.stdout)
        assert described(asked) == described(requests())
        inbox = Inbox()

        def deliver(events: list[Event]) -> None:
            pickle.dump(events, front_end.stdin)
            front_end.stdin.flush()
            inbox(events)

        events = serve(asked, lambda engine, request: engine.submit(request, deliver), inbox)
        found = pickle.load(front_end.stdout)
        assert front_end.wait(TIMEOUT_SECONDS) == 0
    assert found.keys() == events.keys()
    for request in asked:
        name = request.request_id
        events_sent = described(events[name])  # before the chunks are put together
        record = record_of(request, events[name])
        assert found[name] == (events_sent, described(record))
        assert record.times.submitted is not None
        assert record.times.received == (request.received_ns or record.times.submitted)
    record = record_of(asked[1], events["ids"])
    assert None not in (record.times.tokenized, record.times.scheduled, record.times.first_token)
    assert (record.account.num_choices, len(record.account.events) > 3, record.completion_tokens) == (2, True, 8)


@pytest.mark.usefixtures("overlap")
def test_nothing_writes_into_a_request() -> None:
    asked, inbox = requests(), Inbox()
    before = [(pickle.dumps(request), described(request)) for request in asked]
    serve(asked, lambda engine, request: engine.submit(request, inbox), inbox)
    assert [(pickle.dumps(request), described(request)) for request in asked] == before


def test_a_request_that_ends_while_it_is_encoded_is_in_that_phase_and_one_before_is_not() -> None:
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    engine = make_engine(tokenizer=tokenizer, tokenize_workers=1)  # type: ignore[arg-type]
    with engine:
        *_, waits, blocked = requests()
        engine.submit(blocked, inbox)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)
        engine.submit(waits, inbox)
        engine.abort(waits.request_id)
        engine.abort(blocked.request_id)
        ended = inbox.wait_terminal(waits.request_id, blocked.request_id)
        tokenizer.release.set()
    phases = {name: event.times.ended().phases()[-1].name for name, event in ended.items()}
    assert phases == {waits.request_id: "tokenize_wait", blocked.request_id: "tokenize"}


@pytest.mark.parametrize("reason", ["the step fails", "the server stops"])
def test_a_request_that_is_encoded_when_the_engine_ends_is_in_that_phase(reason: str) -> None:
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    engine = make_engine(tokenizer=tokenizer)  # type: ignore[arg-type]
    engine.start()
    blocked = requests()[-1]
    engine.submit(blocked, inbox)
    assert tokenizer.entered.wait(TIMEOUT_SECONDS)
    engine._loop.post(Broken(RuntimeError("gone")) if reason == "the step fails" else Stop(drain=False))
    ended = inbox.wait_terminal(BLOCKED)[BLOCKED]
    assert isinstance(ended, Failed)
    assert ended.times.ended().phases()[-1].name == "tokenize"
    tokenizer.release.set()
    engine.stop()


def all_errors(kind: type[APIError] = APIError) -> list[type[APIError]]:
    return [kind, *(each for sub in kind.__subclasses__() for each in all_errors(sub))]


SPECIAL: dict[type[APIError], APIError] = {
    ContextLengthExceeded: ContextLengthExceeded(10, 12, None, param="messages"),
    ModelNotFound: ModelNotFound("this", "that"),
}


@pytest.mark.parametrize("kind", [kind for kind in all_errors() if kind.__module__ == errors.__name__])
def test_each_error_is_the_same_after_pickle(kind: type[APIError]) -> None:
    error = SPECIAL.get(kind) or kind("A message.", param="n", code="odd", retry_after_seconds=3)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
    ids: dict[str, Any] = {"request_id": "r", "trace_id": "t"}
    assert (copy.body(**ids), copy.headers()) == (error.body(**ids), error.headers())
    assert isinstance(copy, InvalidRequest) == isinstance(error, InvalidRequest)
