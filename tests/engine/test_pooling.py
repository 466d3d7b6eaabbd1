"""The engine with a model that pools: whole texts in steps, one vector for each, and all bounds of text generation."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.engine import Engine
from oaiserve.engine.policy import fair
from oaiserve.engine.pooling import Pooling
from oaiserve.engine.request import Event, Failed, Finished, Pooled, Request, SamplingParams, TokenPrompt
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.engine.step import OutOfMemory, Step
from oaiserve.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from oaiserve.facts.record import StepKind
from tests.engine.doubles import Inbox, ScriptedRunner, make_engine

EMBEDS = Pooling("embed", 2)


BAD = 13  # the token that makes a text one that comes to nothing


def vector_of(sequence: Sequence) -> array[float] | str:
    """A vector of the text's length."""
    return "no usable numbers" if sequence.token_ids[0] == BAD else array("f", [len(sequence.token_ids)] * 2)


def ten_tokens_fit(step: Step) -> None:
    if step.num_tokens > 10:
        raise OutOfMemory("no memory")


def texts(request_id: str, *lengths: int, client: str = "", token: int = 1) -> Request:
    prompts = tuple(TokenPrompt([token] * length, "input") for length in lengths)
    return Request(request_id, prompts, SamplingParams(max_tokens=0), client=client)


def pooling_engine(runner: ScriptedRunner | None = None, **options: int) -> Engine:
    return make_engine(runner or ScriptedRunner(vector_of), pooling=EMBEDS, **options)


def vectors(events: list[Event]) -> dict[int, list[float]]:
    return {event.index: event.vector.tolist() for event in events if isinstance(event, Pooled)}


def test_each_text_is_computed_once_and_whole() -> None:
    runner = ScriptedRunner(vector_of)
    with pooling_engine(runner) as engine:  # 16 tokens a step
        events = list(engine.stream(texts("r", 5, 40, 6, 9, 2)))
        kinds = {step.kind for step in engine.take_steps()}
    assert vectors(events) == {0: [5.0, 5.0], 1: [40.0, 40.0], 2: [6.0, 6.0], 3: [9.0, 9.0], 4: [2.0, 2.0]}
    assert [[tokens for _, _, tokens in step] for step in runner.steps] == [[5], [40], [6, 9], [2]]
    assert kinds == {StepKind.PREFILL}
    assert isinstance(events[-1], Finished)
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (62, 0)


def test_the_phase_prefill_ends_with_the_last_text_and_decode_is_empty() -> None:
    with pooling_engine() as engine:
        *_, end = engine.stream(texts("r", 5, 40))
    assert isinstance(end, Finished)
    times = end.times
    assert times.first_token == times.last_token
    assert times.first_token > times.scheduled
    assert end.account.num_steps == 2
    assert [event.details["tokens"] for event in end.account.events] == [5, 40]
    assert end.account.inter_token_ns.tolist() == []


def test_texts_of_one_token_are_prefills_like_others() -> None:
    with pooling_engine() as engine:
        events = list(engine.stream(texts("r", 1, 1, 3)))
        assert [step.kind for step in engine.take_steps()] == [StepKind.PREFILL]
    assert vectors(events) == {0: [1.0, 1.0], 1: [1.0, 1.0], 2: [3.0, 3.0]}


def test_more_texts_than_may_wait_are_refused_unless_nothing_waits() -> None:
    runner = ScriptedRunner(vector_of, gated=True)
    with pooling_engine(runner, max_waiting=4, max_step_tokens=8) as engine:
        inbox = Inbox()
        engine.submit(texts("r", *[8] * 6), inbox)
        runner.started.get(timeout=60)
        with pytest.raises(Overloaded):
            engine.submit(texts("s", *[8] * 6), inbox)
        runner.permit(6)
        inbox.wait_terminal("r")


def test_a_text_that_comes_to_nothing_fails_its_request_and_no_other() -> None:
    with pooling_engine() as engine:
        inbox = Inbox()
        engine.submit(texts("bad", 3, token=BAD), inbox)
        engine.submit(texts("good", 3), inbox)
        ended = inbox.wait_terminal("bad", "good")
    assert isinstance(ended["bad"], Failed)
    assert isinstance(ended["good"], Finished)


def test_a_model_that_pools_generates_no_text() -> None:
    with pooling_engine() as engine, pytest.raises(InvalidRequest, match="the task 'embed'"):
        engine.generate(["Hi"])


def test_a_text_that_is_longer_than_the_context_is_refused_by_its_field() -> None:
    with pooling_engine(max_model_len=8) as engine:
        *_, end = engine.stream(texts("r", 9))
        assert vectors(list(engine.stream(texts("s", 8)))) == {0: [8.0, 8.0]}
    assert isinstance(end.error, ContextLengthExceeded)
    assert end.error.param == "input"


def test_without_memory_steps_are_halved_but_texts_are_not() -> None:
    runner = ScriptedRunner(vector_of, launching=ten_tokens_fit)
    with pooling_engine(runner) as engine:
        inbox = Inbox()
        engine.submit(texts("fits", 5, 5, 5), inbox)
        engine.submit(texts("too long", 11), inbox)
        ended = inbox.wait_terminal("fits", "too long")
        events = [event for events in inbox.hand_overs for event in events if event.request_id == "fits"]
    assert vectors(events) == {0: [5.0, 5.0], 1: [5.0, 5.0], 2: [5.0, 5.0]}
    assert ended["too long"].error.status == 503


@given(
    lengths=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=40),
    max_step_tokens=st.integers(4, 16),
)
def test_every_text_is_in_exactly_one_step_within_the_budget(
    lengths: list[tuple[str, int]], max_step_tokens: int
) -> None:
    scheduler = Scheduler(BlockPool(0, 4), Limits(4, max_step_tokens), policy=fair, prefix_cache=False)
    sequences = [
        Sequence(str(index), 0, [1] * length, SamplingParams(), max_len=length, client_name=client, is_whole=True)
        for index, (client, length) in enumerate(lengths)
    ]
    for sequence in sequences:
        scheduler.add(sequence)
    computed: list[str] = []
    while (step := scheduler.schedule()) is not None:
        assert step.num_tokens <= max_step_tokens or len(step.chunks) == 1
        assert len(step.chunks) <= 4
        assert all(chunk.num_tokens == chunk.sequence.prompt_len for chunk in step.chunks)
        computed += [sequence.request_id for sequence in step.admitted]
        scheduler.advance(step)
        scheduler.check_integrity()
    assert sorted(computed) == sorted(sequence.request_id for sequence in sequences)
    assert {sequence.place for sequence in sequences} == {Place.NOWHERE}
    for client in "abc":  # whose requests are computed by their lengths, and in their order
        own = [int(name) for name in computed if lengths[int(name)][0] == client]
        assert own == sorted(own, key=lambda index: (lengths[index][1], index))
