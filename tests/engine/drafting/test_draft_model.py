"""The draft model in the engine: it reads what it has computed of the same tokens, and never costs what it does not
bring."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from oaiserve.engine.drafting.draft_model import CATCH_UP_TOKENS, UNKNOWN, DraftModel
from oaiserve.engine.drafting.drafts import MOST_STEP_TOKENS, Drafts
from oaiserve.engine.drafting.step_times import StepTimes
from oaiserve.engine.request import Aborted, Finished
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, ChunkResult, Step
from oaiserve.facts.record import HostPart
from tests.engine.device import Device, check_answers, some_requests
from tests.engine.doubles import TOKENIZER, Clock, Inbox, ScriptedRunner, make_engine, request
from tests.engine.drafting.test_drafts import CHEAP, DEAR
from tests.engine.grammars.test_grammars_in_steps import constrained_requests
from tests.engine.memory import NEVER, sequence

BLOCK_SIZE = 4


class Steady(StepTimes):
    """Steps that all seem to take the same time."""

    def __init__(self, ns: float) -> None:
        super().__init__()
        self._steady_ns = ns

    def observe(self, num_tokens: int, step_ns: int) -> None:
        pass

    def expected_ns(self) -> list[float]:
        return [self._steady_ns] * (MOST_STEP_TOKENS + 1)


class Busy(Drafts):
    """Drafts that seem to cost nothing, and are there also while others wait."""

    def __init__(self, model: DraftModel) -> None:
        super().__init__(model=model)
        self._times, model.times = Steady(1e15), Steady(0.0)

    def propose(self, running: list[Sequence], *, others_wait: bool) -> None:
        super().propose(running, others_wait=False)


def draft_model(runner: Any, clock: Clock | None = None) -> DraftModel:
    return DraftModel(
        runner,
        block_size=BLOCK_SIZE,
        max_len=100_000,
        vocab_size=TOKENIZER.vocab_size,
        clock_ns=clock or Clock(),
    )


@pytest.mark.parametrize("kv_blocks", [400, 30], ids=["much cache", "little cache"])
def test_it_reads_only_what_it_has_computed_of_the_same_tokens(kv_blocks: int) -> None:
    """The device compares all tokens that it attends to: with preemptions, choices, grammars, shortages and aborts."""
    rng = random.Random(kv_blocks)
    requests = [*some_requests(rng, 60), *constrained_requests(rng, 20)]
    device = Device(lambda step: step.num_tokens <= rng.choice([8, 48, 48, 48]), seed=1)
    drafts = Busy(draft_model(Device()))
    found = check_answers(rng, requests, device, share_leaving=0.1, drafts=drafts, kv_blocks=kv_blocks)
    assert all(isinstance(event, Finished | Aborted) for event in found.ended.values())
    num_drafted, num_accepted = found.total("num_model_draft_tokens"), found.total("num_accepted_model_tokens")
    assert num_drafted > 100
    assert num_accepted > 0.9 * num_drafted, "the draft model is the model, so only ends of answers cut its drafts"


# -- what it is worth -------------------------------------------------------------------------------------------------


def guessing(launching: Callable[[Step], object]) -> ScriptedRunner:
    """Return the runner of a draft model, whose guess is always 7."""
    return ScriptedRunner(lambda _: 7, launching=launching)


def decoding(name: str = "r", prompt_len: int = 30) -> Sequence:
    """Return a sequence that decodes, in whose text nothing can be looked up."""
    one = sequence(name, [100 + i for i in range(prompt_len)], max_tokens=50_000)
    one.token_ids.append(99)
    one.num_tokens, one.num_computed = prompt_len + 1, prompt_len
    one.blocks = list(range(2000))
    return one


class Run:
    """Steps of some sequences, with times by their tokens. The model draws the id 7 with a probability, or else new
    ids."""

    def __init__(self, ns_of_pass: Callable[[int], int], ns_of_step: list[int]) -> None:
        self.clock = Clock()
        self.sizes: list[int] = []  # of the draft model's passes
        self._ns_of_pass = ns_of_pass
        self.drafts = Drafts(model=draft_model(guessing(self._take_time), self.clock))
        self._ns_of_step = ns_of_step
        self._rng = random.Random(1)
        self._next_id = 1000

    def _take_time(self, step: Step) -> None:
        self.sizes.append(step.num_tokens)
        self.clock.now_ns += self._ns_of_pass(step.num_tokens)

    def steps(self, running: list[Sequence], number: int, chance: float) -> float:
        """Run so many steps, and return the nanoseconds for each token of an answer."""
        before_ns, num_tokens, clock = self.clock.now_ns, 0, self.clock
        for _ in range(number):
            self.drafts.propose(running, others_wait=False)
            chunks = [Chunk(o, o.num_computed, 1 + len(o.draft), 1 + len(o.draft), tuple(o.draft)) for o in running]
            step = Step(chunks)
            began_ns = clock.now_ns
            if self.drafts.model.is_asked:
                self.drafts.model.write(step)
            draft_ns = clock.now_ns - began_ns
            assert all(UNKNOWN not in chunk.draft for chunk in step.chunks)
            results = [ChunkResult(self._drawn(len(chunk.draft), chance)) for chunk in step.chunks]
            step_ns = self._ns_of_step[step.num_tokens]
            clock.now_ns += step_ns
            self.drafts.verified(step, results, step_ns, draft_ns)
            for chunk, result in zip(step.chunks, results, strict=True):
                one = chunk.sequence
                one.token_ids += result.token_ids
                num_tokens += len(result.token_ids)
                one.num_tokens = len(one.token_ids)
                one.num_computed = one.num_tokens - 1
        return (clock.now_ns - before_ns) / num_tokens

    def _drawn(self, num_drafted: int, chance: float) -> list[int]:
        drawn = []
        for _ in range(num_drafted):
            if self._rng.random() >= chance:
                break
            drawn.append(7)
        self._next_id += 1
        return [*drawn, self._next_id]


def small(num_tokens: int) -> int:
    """Return the time of a pass of a model that takes an eighth of the time."""
    return CHEAP[num_tokens] // 8


def test_a_good_draft_model_makes_answers_faster() -> None:
    run, one = Run(small, CHEAP), decoding()
    run.steps([one], 100, 0.9)
    assert run.steps([one], 200, 0.9) < CHEAP[1] / 2.4
    assert run.steps([one], 200, 0.7) < CHEAP[1] / 1.5


@pytest.mark.parametrize(
    ("ns_of_pass", "ns_of_step", "chance"),
    [(small, CHEAP, 0.0), (small, CHEAP, 0.02), (lambda n: CHEAP[n], CHEAP, 1.0), (lambda n: DEAR[n] // 2, DEAR, 0.3)],
    ids=["never right", "hardly ever right", "as slow as the model", "each token costs the same"],
)
@pytest.mark.parametrize("num_sequences", [1, 5])
def test_where_it_is_not_worth_its_time_it_costs_less_than_two_percent(
    ns_of_pass: Callable[[int], int], ns_of_step: list[int], chance: float, num_sequences: int
) -> None:
    run = Run(ns_of_pass, ns_of_step)
    run.steps([decoding(f"{i}") for i in range(num_sequences)], 1500, chance)
    # New sequences begin where the old ones have ended.
    for number in range(5):
        running = [decoding(f"{number}.{i}", 200) for i in range(num_sequences)]
        assert run.steps(running, 400, chance) < 1.02 * ns_of_step[num_sequences] / num_sequences


def test_a_draft_model_that_becomes_good_is_found_out() -> None:
    run, one = Run(small, CHEAP), decoding()
    run.steps([one], 1000, 0.0)
    run.steps([one], 2500, 0.95)
    assert run.steps([one], 200, 0.95) < CHEAP[1] / 2


def test_beyond_some_batch_it_is_silent() -> None:
    run = Run(small, DEAR)
    run.steps([decoding(f"{i}") for i in range(16)], 600, 0.5)
    num_passes = len(run.sizes)
    run.steps([decoding(f"{i}") for i in range(MOST_STEP_TOKENS)], 100, 0.9)
    assert len(run.sizes) == num_passes


def test_a_prompt_is_computed_in_pieces_and_each_token_once() -> None:
    run, one = Run(small, CHEAP), decoding(prompt_len=300)
    run.steps([one], 30, 0.9)
    sizes = run.sizes
    assert sizes[:4] == [CATCH_UP_TOKENS] * 4
    assert sizes[4] == 304 - 4 * CATCH_UP_TOKENS, "with the tokens of the steps meanwhile"
    assert sizes[5] <= 2


def test_a_prompt_that_it_has_computed_for_another_sequence_is_not_computed_again() -> None:
    run, one, two = Run(small, CHEAP), decoding("a", 200), decoding("b", 200)
    for each in (one, two):
        each.hashes = [bytes([i]) for i in range(50)]
    run.steps([one], 30, 0.9)
    del run.sizes[:]
    two.blocks = [*one.blocks[:50], *range(3000, 3500)]
    run.steps([two], 1, 0.9)
    assert run.sizes[0] <= 2
    three = decoding("c", 200)
    three.hashes, three.blocks = [bytes([100 + i]) for i in range(50)], one.blocks
    del run.sizes[:]
    run.steps([three], 1, 0.9)
    assert run.sizes[0] == CATCH_UP_TOKENS, "the blocks are the same, and their tokens are not"


def test_a_guess_comes_from_where_it_is_worth_more() -> None:
    """What is looked up costs nothing, so the draft model is asked only if it is right more often."""
    run = Run(small, CHEAP)
    run.steps([decoding()], 50, 0.8)
    one = sequence("r", [i % 4 for i in range(12)], max_tokens=200)
    one.token_ids.append(0)
    one.num_tokens, one.num_computed, one.blocks = 13, 12, list(range(100))
    run.drafts.propose([one], others_wait=False)
    assert (one.draft[:4], one.draft_is_models) == ([1, 2, 3, 0], False)
    one.lookup.acceptance[:] = [0.1, 0.1]
    run.drafts.propose([one], others_wait=False)
    assert (one.draft[:1], one.draft_is_models) == ([UNKNOWN], True)


# -- a step -----------------------------------------------------------------------------------------------------------


def test_a_guess_ends_with_the_end_of_the_sequence_and_the_step_is_sorted_anew() -> None:
    model = draft_model(guessing(lambda _: None))
    one, two = decoding("a"), decoding("b")
    one.stop_ids = frozenset([7])
    two.token_ids[-1] = NEVER
    model.begin_step([one, two])
    model.ask(one, 3)
    model.ask(two, 2)
    step = Step([Chunk(o, 30, 1 + len(o.draft), 1 + len(o.draft), tuple(o.draft)) for o in (one, two)])
    model.write(step)
    assert [(chunk.draft, chunk.num_tokens, chunk.max_draws) for chunk in step.chunks] == [
        ((7,), 2, 2),
        ((7, 7), 3, 3),
    ]


def test_its_time_is_a_part_of_the_engine_thread_and_of_the_step() -> None:
    """The step begins with the draft model, and all parts add up."""
    clock = Clock()
    runner = guessing(lambda _: clock.move(0.001))
    engine = make_engine(ScriptedRunner(computing=lambda _: clock.move(0.008)), clock_ns=clock, drafts="lookup")
    engine._loop._stepper._drafts = Busy(draft_model(runner, clock))
    began_ns, inbox = clock.now_ns, Inbox()
    with engine:
        engine.submit(request(max_tokens=12, ignore_eos=True), inbox)
        account = inbox.wait_terminal("r")["r"].account
    steps = engine.take_steps()
    assert sum(step.host_ns[HostPart.DRAFT] for step in steps) > 0
    for step in steps:
        assert step.duration_ns == step.host_ns[HostPart.DRAFT] + 8_000_000
        assert step.idle_ns == 0
    assert sum(step.duration_ns for step in steps) == clock.now_ns - began_ns == account.model_ns
    assert sum(engine.snapshot().host_ns.values()) == clock.now_ns - began_ns
    assert account.num_model_draft_tokens == engine.snapshot().num_model_draft_tokens > 0
