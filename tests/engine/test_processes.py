"""Requests and events are data: they pass between processes by pickle, and nothing writes into them on the way."""

import pickle

import pytest

from oaiserve.engine.loop import Abort, Stop
from oaiserve.engine.request import Aborted, Failed, Finished, Request
from tests.engine.doubles import TIMEOUT_SECONDS, BlockedTokenizer, Inbox, make_engine
from tests.engine.front_end import BLOCKED, described, requests


def serve(asked: list[Request]) -> Inbox:
    """Run the requests until all have ended as they are expected to, and return their events."""
    inbox = Inbox()
    tokenizer = BlockedTokenizer()
    with make_engine(tokenizer=tokenizer, kv_blocks=64) as engine:
        for request in asked:
            engine.submit(request, inbox)
        assert tokenizer.entered.wait(TIMEOUT_SECONDS)
        engine.abort(BLOCKED)
        ended = inbox.wait_terminal(*(request.request_id for request in asked))
        tokenizer.release.set()
    assert {name: type(event) for name, event in ended.items()} == {
        **dict.fromkeys(("text", "ids", "again", "chat", "none"), Finished),
        **dict.fromkeys(("too long", "no words"), Failed),
        BLOCKED: Aborted,
    }
    return inbox


@pytest.mark.usefixtures("overlap")
def test_nothing_writes_into_a_request_and_events_are_the_same_after_pickle() -> None:
    asked = requests()
    before = [(pickle.dumps(request), described(request)) for request in asked]
    inbox = serve(asked)
    assert [(pickle.dumps(request), described(request)) for request in asked] == before
    assert described(pickle.loads(pickle.dumps(inbox.hand_overs))) == described(inbox.hand_overs)


@pytest.mark.parametrize("reason", ["the step fails", "the server stops"])
def test_a_request_that_is_encoded_when_the_engine_ends_is_in_that_phase(reason: str) -> None:
    tokenizer, inbox = BlockedTokenizer(), Inbox()
    engine = make_engine(tokenizer=tokenizer)
    engine.start()
    blocked = requests()[-1]
    engine.submit(blocked, inbox)
    assert tokenizer.entered.wait(TIMEOUT_SECONDS)
    engine._loop.post(Abort([]) if reason == "the step fails" else Stop(drain=False))
    ended = inbox.wait_terminal(BLOCKED)[BLOCKED]
    assert isinstance(ended, Failed)
    assert ended.times.ended().phases()[-1].name == "tokenize"
    tokenizer.release.set()
    engine.stop()
