"""The engine with a model that pools: whole texts in steps, one vector for each, and all bounds of text generation."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import Event, Failed, Finished, Pooled, Request, SamplingParams, TokenPrompt
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.policy import fair
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.blocks import BlockPool
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import OutOfMemory, Step
from oaiserve.engine.types.pooling import Pooling
from oaiserve.errors import ContextLengthExceeded, InvalidRequest, Overloaded
from oaiserve.facts.step_record import StepKind
from tests.engine.answers import collect
from tests.engine.doubles import Inbox, ScriptedRunner, make_engine, stepping

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


def pooling_engine(runner: ScriptedRunner | None = None, **options: int | str) -> Engine:
    return make_engine(runner or ScriptedRunner(vector_of), pooling=EMBEDS, **options)


def vectors(events: list[Event]) -> dict[int, list[float]]:
    return {event.index: event.vector.tolist() for event in events if isinstance(event, Pooled)}


def vectors_of(*lengths: int) -> dict[int, list[float]]:
    return {index: [float(length)] * 2 for index, length in enumerate(lengths)}


@pytest.mark.parametrize("steps", [[[5], [40], [6, 9], [2]], [[1, 1, 3]]], ids=["long and short", "one token"])
def test_each_text_is_computed_once_and_whole_in_prefills(steps: list[list[int]]) -> None:
    runner = ScriptedRunner(vector_of)
    lengths = [length for step in steps for length in step]
    with pooling_engine(runner) as engine:  # 16 tokens a step
        events = list(engine.stream(texts("r", *lengths)))
        kinds = {step.kind for step in engine.take_steps()}
    assert vectors(events) == vectors_of(*lengths)
    assert [[tokens for _, _, tokens in step] for step in runner.steps] == steps
    assert kinds == {StepKind.PREFILL}
    assert isinstance(events[-1], Finished)
    assert (events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens) == (sum(lengths), 0)


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


def test_more_texts_than_may_wait_are_refused_unless_nothing_waits() -> None:
    options = {"pooling": EMBEDS, "max_waiting": 4, "max_step_tokens": 8}
    runner = ScriptedRunner(vector_of, gated=True)
    with stepping(texts("r", *[8] * 6), runner=runner, **options) as (engine, _, inbox):
        with pytest.raises(Overloaded):
            engine.submit(texts("s", *[8] * 6), inbox)
        runner.permit(6)
        inbox.wait_terminal("r")


def test_a_text_that_comes_to_nothing_fails_its_request_and_no_other() -> None:
    with pooling_engine() as engine:
        ended = collect(engine, [texts("bad", 3, token=BAD), texts("good", 3)]).ended
    assert {name: type(end) for name, end in ended.items()} == {"bad": Failed, "good": Finished}


def test_a_model_that_pools_generates_no_text() -> None:
    with pooling_engine() as engine, pytest.raises(InvalidRequest, match="the task 'embed'"):
        engine.generate(["Hi"])


def test_a_text_that_is_longer_than_the_context_is_refused_by_its_field() -> None:
    with pooling_engine(max_model_len=8) as engine:
        *_, end = engine.stream(texts("r", 9))
        assert vectors(list(engine.stream(texts("s", 8)))) == vectors_of(8)
        *_, end_of_several = engine.stream(texts("t", 8, 8, 9))
    assert isinstance(end.error, ContextLengthExceeded)
    assert end.error.param == "input"
    reason = "This model's maximum context length is 8 tokens. However, your {} resulted in 9 tokens. Please reduce "
    assert end.error.message.startswith(reason.format("input"))
    assert end_of_several.error.message.startswith(reason.format("input[2]"))


def test_without_memory_steps_are_halved_but_texts_are_not() -> None:
    runner = ScriptedRunner(vector_of, launching=ten_tokens_fit)
    with pooling_engine(runner) as engine:
        ended = collect(engine, [texts("fits", 5, 5, 5), texts("too long", 11)], inbox := Inbox()).ended
        events = [event for events in inbox.hand_overs for event in events if event.request_id == "fits"]
    assert vectors(events) == vectors_of(5, 5, 5)
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
    for client in "abc":  # Their requests are computed by length, and in their order.
        own = [int(name) for name in computed if lengths[int(name)][0] == client]
        assert own == sorted(own, key=lambda index: (lengths[index][1], index))


def test_texts_of_a_request_are_computed_in_order_under_every_policy() -> None:
    runner = ScriptedRunner(vector_of)
    with pooling_engine(runner, policy="shortest") as engine:
        events = list(engine.stream(texts("r", 40, 6, 2)))
    assert vectors(events) == vectors_of(40, 6, 2)
    assert [[tokens for _, _, tokens in step] for step in runner.steps] == [[40], [6, 2]]
