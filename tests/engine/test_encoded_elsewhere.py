"""Requests whose prompts another process encodes: the engine does with them what it does with its own."""

from typing import Any

import pytest

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Grammar, Request, SamplingParams, TextPrompt, TokenPrompt
from oaiserve.engine.tokenize import Tokenized, TokenizeFailed, TokenizeStarted
from oaiserve.errors import InvalidRequest, Overloaded, Unavailable
from tests.engine.doubles import TOKENIZER, Inbox, ScriptedRunner, make_engine


def request(**params: Any) -> Request:
    """Return a request as it comes from another process: without its prompt."""
    return Request("r", (TokenPrompt(()),), SamplingParams(max_tokens=4, **params), num_bytes=100, received_ns=5)


def opened(engine: Engine, asked: Request) -> Inbox:
    inbox = Inbox()
    engine.open(asked, inbox, 10)
    engine.encoding_started(TokenizeStarted(asked, 11))
    return inbox


@pytest.mark.parametrize("is_encoded", [True, False])
def test_what_cannot_be_encoded_or_obeyed_ends_its_request(is_encoded: bool) -> None:
    with make_engine() as engine:
        asked = request(grammar=Grammar("regex", "(", param="structured_outputs"))
        inbox = opened(engine, asked)
        if is_encoded:
            engine.encoded(Tokenized(asked, [TOKENIZER.encode(TextPrompt("Hello"))], [None], at_ns=12))
        else:
            engine.not_encoded(TokenizeFailed(asked, InvalidRequest("It has no tokens.", param="prompt")))
        end = inbox.wait_terminal("r")["r"]
        assert isinstance(end.error, InvalidRequest)
        assert end.error.param == ("structured_outputs" if is_encoded else "prompt")
        assert engine._body_bytes.total == engine.num_waiting == 0


def test_what_is_aborted_while_it_is_encoded_leaves_nothing() -> None:
    with make_engine() as engine:
        asked = request()
        inbox = opened(engine, asked)
        engine.abort("r")
        inbox.wait_terminal("r")
        engine.encoded(Tokenized(asked, []))
        assert engine._body_bytes.total == engine.num_waiting == 0


def test_what_waits_in_other_processes_counts() -> None:
    with make_engine(ScriptedRunner(), max_waiting=2) as engine:
        opened(engine, request())
        engine.take_room("other", 10)
        with pytest.raises(Overloaded):
            engine.take_room("other", 10)
        with pytest.raises(Overloaded):
            engine.open(Request("more", (TokenPrompt(()),)), Inbox(), 10)
        engine.give_room_back("other", 10)
        engine.take_room("other", 10)
        engine.give_room_back("other", 10)
        engine.abort("r")
        engine.drain()
        with pytest.raises(Unavailable):
            engine.take_room("other", 10)
