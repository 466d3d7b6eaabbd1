"""Messages come back from bytes as they were, whatever requests and events have in them."""

from array import array
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oaiserve.checkpoints.adapters import BadAdapter
from oaiserve.config import Bytes, EngineOptions
from oaiserve.engine.request import (
    Aborted,
    ChatPrompt,
    Failed,
    Finished,
    LeftOut,
    Pooled,
    Prompt,
    PromptDone,
    PromptProgress,
    Request,
    TextPrompt,
    TokenChunk,
    TokenPrompt,
    TooManyTokens,
)
from oaiserve.errors import APIError, ContextLengthExceeded, InternalError, StartupError, UnsupportedMedia
from oaiserve.explain.step_cost import BY_ROWS
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.step_record import StepRecord
from oaiserve.process.frames import Frames, framed
from oaiserve.process.messages import Answer, Ended, Health, Ready, Start, Step, Submit, ToEngine, ToFront
from oaiserve.process.plain_data import decoder, encode
from oaiserve.process.remote_tokenizer import TokenizerFacts
from tests.engine.doubles import TOKENIZER
from tests.process.plain_values import INTEGERS, any_of

to_engine = decoder(ToEngine)
to_front = decoder(ToFront)
PROMPTS = st.one_of([any_of(kind) for kind in get_args(Prompt)])
REQUESTS = any_of(Request, prompts=st.lists(PROMPTS, min_size=1, max_size=3).map(tuple))
EVENTS = [LeftOut, PromptProgress, PromptDone, TokenChunk, Pooled, Finished, Failed, Aborted]


def plain(value: Any) -> Any:
    """Return a value whose errors can be compared."""
    if isinstance(value, Failed):
        error = value.error
        return (type(error), vars(error), value.request_id, value.usage, value.times, value.account)
    return value


@given(REQUESTS, INTEGERS)
@settings(max_examples=100)
def test_a_request_reaches_the_engine_as_it_was_submitted(request: Request, submitted_ns: int) -> None:
    message = to_engine(encode(Submit.of(request, submitted_ns)))
    assert message.request() == request
    assert message.submitted_ns == submitted_ns


@given(st.lists(st.one_of([any_of(kind) for kind in EVENTS]), max_size=6), any_of(EngineNumbers), any_of(StepRecord))
@settings(max_examples=100)
def test_a_step_brings_all_its_events_and_numbers(
    events: list[Any], numbers: EngineNumbers, record: StepRecord
) -> None:
    step = Step.of(events)
    step.numbers = numbers
    step.steps = [record]
    step.left_waiting = [("client", 2)]
    step.health = Health(1, 2, 3, "launch", BY_ROWS)
    received = to_front(encode(step))
    assert received.numbers == numbers
    assert received.steps == [record]
    assert received.left_waiting == [("client", 2)]
    assert received.health == step.health
    by_kind = sorted(events, key=lambda event: EVENTS.index(type(event)))
    assert [plain(event) for event in received.events()] == [plain(event) for event in by_kind]


def test_a_prompt_of_an_array_of_ids_crosses_as_a_list() -> None:
    request = Request("r", (TokenPrompt(array("i", [1, 2])),))
    assert to_engine(encode(Submit.of(request, 0))).request().prompts[0].token_ids == [1, 2]


def test_numbers_beyond_64_bits_and_halves_of_surrogate_pairs_cross() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**40}}}]
    request = Request(
        "r", (ChatPrompt([{"role": "user", "content": "\ud800"}], tools=tools, told_tools=[]), TextPrompt("\udfff"))
    )
    assert to_engine(encode(Submit.of(request, 1))).request() == request


@pytest.mark.parametrize(
    "error",
    [
        ContextLengthExceeded(8, 9, param="prompt"),
        UnsupportedMedia("no", "gzip"),
        StartupError("There is no model."),
        BadAdapter("adapter_config.json is missing"),
        TooManyTokens(9, is_exact=False),
    ],
)
def test_an_error_crosses_with_its_kind_and_attributes(error: Exception) -> None:
    found = to_front(encode(Answer(1, error=error))).error
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_an_error_of_an_unknown_kind_crosses_as_the_nearest_known_one() -> None:
    class Odd(InternalError):
        pass

    class Odder(ValueError):
        pass

    found = to_front(encode(Answer(1, error=Odd("odd")))).error
    assert isinstance(found, InternalError)
    found = to_front(encode(Answer(1, error=Odder("odder")))).error
    assert isinstance(found, InternalError)
    assert found.body()["error"]["message"] == "odder"


def ready_facts(numbers: EngineNumbers | None = None) -> Ready:
    return Ready(
        path=None,
        tokenizer=TokenizerFacts.of(TOKENIZER),
        max_model_len=8,
        vocab_size=9,
        default_params={"temperature": 0.5},
        recommendation=None,
        pooling=None,
        media=frozenset(["image"]),
        adapters=[],
        model_info={"dtype": "float32"},
        capacity={"drafts": True, "block_size": 16},
        features={"exact": ""},
        kv_bytes=1,
        is_on_cpu=True,
        numbers=numbers or EngineNumbers(),
    )


@given(any_of(EngineNumbers))
@settings(max_examples=5)
def test_facts_of_a_ready_engine_cross(numbers: EngineNumbers) -> None:
    ready = ready_facts(numbers)
    assert to_front(encode(ready)) == ready


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(),
        EngineOptions(lora=("a=/a",), lora_memory=Bytes("1GiB"), prefix_cache_dir=Path("/cache"), cpu_threads=2),
    ],
)
def test_settings_cross(options: EngineOptions) -> None:
    start = Start(
        model="demo", name="demo", options=options, plugins=("a",), settings=None, log_level="info", log_format="auto"
    )
    assert to_engine(encode(start)) == start


@given(st.lists(st.binary(max_size=300), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=50))
def test_a_stream_that_is_cut_at_any_byte_has_the_same_messages(messages: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    frames = Frames()
    found = []
    at = 0
    for size in [*sizes, len(stream)]:
        found += frames.push(stream[at : at + size])
        at += size
    assert found == messages


def test_a_stream_that_ends_within_a_message_has_only_those_before() -> None:
    stream = framed(encode(Ended("one"))) + framed(encode(Ended("two")))
    for end in range(len(stream)):
        frames = Frames().push(stream[:end])
        assert [to_front(frame).reason for frame in frames] == ["one", "two"][: end >= len(stream) // 2]


def test_an_api_error_keeps_its_status() -> None:
    found = to_front(encode(Answer(1, error=APIError("broken", code="x")))).error
    assert (found.status, found.code) == (500, "x")
