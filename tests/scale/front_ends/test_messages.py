"""Messages between front ends and the engine process come out as they went in, whatever is in them."""

import math
import random
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    FinishReason,
    Grammar,
    Pooled,
    PromptDone,
    PromptProgress,
    Reasoning,
    Request,
    SamplingParams,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
    Usage,
)
from oaiserve.errors import APIError, ContextLengthExceeded, DeadlineRefused, InvalidRequest, ModelNotFound, Overloaded
from oaiserve.facts.continuation import StreamSplitter, take_sent
from oaiserve.facts.record import Cause, EngineAccount, EventKind, Outcome, RequestRecord, ToolCallOutcome, WaitReason
from oaiserve.facts.times import RequestTimes
from oaiserve.facts.trace import TraceContext
from oaiserve.files.adapters import BadAdapter
from oaiserve.http.connections import Connections
from oaiserve.routes.responses.store import ConversationTooLarge, ResponseDatabase, StoredResponse
from oaiserve.scale.front_ends.calls import OFFERED
from oaiserve.scale.front_ends.front_end import FrontEnd
from oaiserve.scale.front_ends.messages import (
    LENGTH,
    Answered,
    AskFailed,
    Call,
    Events,
    Message,
    Recorded,
    Submit,
    framed,
    of_engine,
    of_front_end,
    packed,
)
from tests.engine.front_end import described, requests
from tests.engine.logprobs_for_tests import token_logprobs
from tests.records import record_of

TIMES = RequestTimes(1, 2, 3, 4, 5, 6, 7)


def body(message: Message) -> bytes:
    frame = framed(message)
    (length,) = LENGTH.unpack_from(frame)
    assert length == len(frame) - LENGTH.size
    return bytes(frame[LENGTH.size :])


def arrived(method: Callable[..., object], argument: object) -> Any:
    """Return the only argument of a call of a front end, as the engine process gets it."""
    call = of_front_end(body(Call(method.__qualname__, packed((argument,)), 0)))
    (argument,) = OFFERED[call.method].arguments.decode(call.arguments)
    return argument


def account() -> EngineAccount:
    account = EngineAccount(waits_ns={WaitReason.BATCH_FULL: 12}, num_choices=2, first_step=0, grammar_kind="regex")
    account.decode_causes_ns = {Cause.ALONE: 5, Cause.HOST: 1}
    account.note(EventKind.PREFILL_CHUNK, 40, None, start=0, tokens=64)
    account.note(EventKind.FINISHED, 2**62, 1, reason="length")
    account.inter_token_ns.extend([1, 2**40])
    return account


def logprobs() -> TokenLogprobs:
    return token_logprobs([(1, b"a", -0.5), (2, b"\xff", -math.inf), (3, b"b", -1.5)], [(2, b"c", -2.0)])


def test_the_events_of_a_step_come_in_the_order_of_each_request() -> None:
    events: list[Event] = [
        TokenChunk("a", 0, "x", [1], None),
        PromptProgress("a", 90, 10, 20, 5, TIMES),
        PromptDone("a", 1, [1, 2], None, TIMES, 1),
        TokenChunk("a", 1, "y", [2, 3], logprobs(), FinishReason.STOP, "\n", [1, 0], True),
        Finished("a", Usage(1, 2, 3), TIMES, account()),
        Failed("b", Overloaded("full", retry_after_seconds=7), Usage(0, 0, 0), RequestTimes(received=1), account()),
        Pooled("c", 4, array("f", [0.5, -math.inf])),
        Aborted("d", Usage(0, 0, 0), TIMES, EngineAccount()),
    ]
    message = of_engine(body(Events.of(events)))
    assert isinstance(message, Events)
    got = message.in_order()
    assert sorted(map(described, got)) == sorted(map(described, events))
    of_a = [event for event in got if event.request_id == "a"]
    assert [type(event) for event in of_a] == [PromptProgress, PromptDone, TokenChunk, TokenChunk, Finished]
    assert [type(event.finish_reason) for event in of_a[2:4]] == [type(None), FinishReason]


@given(st.text(), st.lists(st.integers(0, 2**31 - 1)), st.none() | st.text() | st.integers(0, 2**31 - 1))
def test_any_chunk_comes_out_as_it_went_in(text: str, token_ids: list[int], stop_reason: str | int | None) -> None:
    chunk = TokenChunk("id", 3, text, token_ids, None, FinishReason.LENGTH, stop_reason)
    message = of_engine(body(Events.of([chunk])))
    assert isinstance(message, Events)
    assert message.chunks == [chunk]


def errors() -> list[Exception]:
    found = [kind("The message.", param="p", retry_after_seconds=3) for kind in kinds(InvalidRequest)]
    found += [Overloaded("text", code="own"), ModelNotFound("a", "b", "c"), InvalidRequest("quotes '\ud83d'")]
    return [
        DeadlineRefused("Too late.", forecast={"end_ms": [1.0, 2.0, 3.5]}, retry_after_seconds=4),
        *found,
        ContextLengthExceeded(8, 9, None, param="messages"),
        BadAdapter("it is broken"),
        ConversationTooLarge(),
    ]


def kinds(kind: type[APIError]) -> list[type[APIError]]:
    return [kind] + [
        more for below in kind.__subclasses__() for more in kinds(below) if more is not ContextLengthExceeded
    ]


@pytest.mark.parametrize("error", errors(), ids=lambda error: type(error).__name__)
def test_errors_come_out_as_they_went_in(error: Exception) -> None:
    message = of_engine(body(AskFailed(3, error)))
    assert isinstance(message, AskFailed)
    assert described(message.error) == described(error)
    assert type(message.error) is type(error)


ALL_FIELDS = SamplingParams(
    grammar=Grammar("json_schema", "{}"),
    reasoning=Reasoning("</think>", budget=3),
    visible_special_ids=frozenset([1]),
    logit_bias={3: -1.5},
)
ALL = Request("all", (TextPrompt("x"),), ALL_FIELDS, 5, "salt", 3, 0, "client", 77, 88)


@pytest.mark.parametrize("request_", [*requests(), ALL], ids=lambda request: request.request_id)
def test_a_request_comes_out_without_its_prompts(request_: Request) -> None:
    message = arrived(FrontEnd.submit, Submit.of(request_, 99))
    without = replace(request_, prompts=tuple(TokenPrompt(()) for _ in request_.prompts))
    assert (message.request(), message.submitted_ns) == (without, 99)


def test_half_of_a_surrogate_pair_in_a_request_is_no_message() -> None:
    request = Request("r", (TextPrompt("x"),), SamplingParams(stop=("\ud83d",)))
    with pytest.raises(UnicodeEncodeError):
        packed(Submit.of(request, 1))


def record(**fields: Any) -> RequestRecord:
    of_client: dict[str, Any] = {
        "trace": TraceContext(2**127 + 1, 2**64 - 1, 5, True, "a=b"),
        "outcome": Outcome.REJECTED,
        "http_status": 429,
        "finish_reasons": ("stop", "length"),
        "tool_calls": {ToolCallOutcome.CALLED: 2},
        "params": {"seed": -(2**63), "temperature": 0.5, "stream": True, "kind": "x"},
        "account": account(),
    }
    return record_of(1, 2, 3, 4, 5, 6, 7, 8, **(of_client | fields))


def test_a_record_gets_its_account_where_it_arrives() -> None:
    asked = record()
    got = arrived(FrontEnd.record, Recorded.of(asked)).record(asked.account)
    assert got == asked
    kinds = [type(value) for value in (got.outcome, got.times, *got.tool_calls)]
    assert kinds == [Outcome, RequestTimes, ToolCallOutcome]


def test_answers_have_the_type_that_was_asked_for() -> None:
    stored = [StoredResponse("a", "b", None, b"\0", b"{}")]
    message = of_engine(body(Answered(4, packed(stored))))
    assert isinstance(message, Answered)
    assert OFFERED["ResponseDatabase.conversation"].answer.decode(message.value) == stored


def test_any_method_that_is_offered_can_be_called_and_no_other_one() -> None:
    classes = {kind.__name__: kind for kind in (FrontEnd, ResponseDatabase, Connections)}
    names = {name: name.split(".") for name in OFFERED}
    assert all(getattr(classes[kind], method) is OFFERED[name].method for name, (kind, method) in names.items())
    others = {"FrontEnd.start", "FrontEnd.send", "FrontEnd.connected", "FrontEnd._lost", "ResponseDatabase.close"}
    assert not OFFERED.keys() & others


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", msgspec.DecodeError),
        (b"\xc1", msgspec.DecodeError),
        (body(Call("FrontEnd.abort", packed((1,)), 0)), msgspec.ValidationError),
        (body(Call("FrontEnd.abort", packed(("a", "b")), 0)), msgspec.ValidationError),
        (body(Call("FrontEnd._lost", packed(()), 0)), KeyError),
        (body(Events.of([])), msgspec.ValidationError),
    ],
)
def test_what_is_no_call_of_a_front_end_is_refused(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        FrontEnd._take(cast(FrontEnd, SimpleNamespace()), data)


def test_what_a_spoiled_message_says_is_data_of_its_type_or_refused() -> None:
    """10,000 messages of front ends with other bytes, and as many of a server to a gateway and back."""
    rng, num_read = random.Random(0), 0
    sent = [body(Call("FrontEnd.submit", packed((Submit.of(request, 9),)), 0)) for request in requests()]
    marks = b'data: {"a": 1}\n\n: tokens [0,[7,8]]\n\n: tokens [1,[]]\n\n'

    def spoiled(content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(changed))
            changed[place : place + rng.randint(0, 2)] = rng.randbytes(rng.randint(0, 2))
        return bytes(changed)

    for _ in range(10_000):
        data = spoiled(rng.choice(sent))
        with suppress(msgspec.DecodeError, UnicodeDecodeError, KeyError):
            call = of_front_end(data)
            OFFERED[call.method].arguments.decode(call.arguments)
            num_read += 1
        with suppress(msgspec.DecodeError):
            _, pieces = StreamSplitter(is_marked=True).push(spoiled(marks))
            assert all(type(number) is int for piece in pieces for number in (piece.choice, *piece.token_ids))
        with suppress(ValueError):
            take_sent(bytearray(spoiled(b"[[0,[7,8]]]")), f"{rng.randint(-1, 20)}")
    assert 100 < num_read < 9000


def test_calls_are_no_messages_to_front_ends() -> None:
    with pytest.raises(msgspec.ValidationError):
        of_engine(body(Call("FrontEnd.up", packed(()), 0)))
