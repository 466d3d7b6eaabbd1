"""A device without a model, for tests of the scheduler: a memory of token ids stands for keys and values."""

from collections.abc import Callable
from typing import Any

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.pacing import UNIT, StepTime
from oaiserve.engine.scheduling.policy import fcfs
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.engine.sequences.blocks import BlockPool, StatePool
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Draw, Step
from oaiserve.engine.tiers.lower_tier import LowerTier
from oaiserve.explain.step_cost import StepCost


class FixedTarget(StepTime):
    """Step times with a target that doesn't follow from the cost. Few rows make a step efficient."""

    def __init__(
        self, cost: Callable[[], StepCost | None], seconds: float, most_tokens: int, itl_seconds: float | None = None
    ) -> None:
        super().__init__(cost, most_tokens, itl_seconds)
        self._seconds = seconds

    def target(self, cost: StepCost) -> tuple[int, float]:
        return UNIT, self._seconds * 1e9


def make(
    kv_blocks: int = 16,
    block_size: int = 4,
    max_running: int = 4,
    max_step_tokens: int = 8,
    policy: Any = fcfs,
    prefix_cache: bool = True,
    states: StatePool | None = None,
    step_time: StepTime | None = None,
    make_tier: Callable[[BlockPool], LowerTier] | None = None,
    **limits: Any,
) -> Scheduler:
    pool = BlockPool(kv_blocks, block_size)
    return Scheduler(
        pool,
        Limits(max_running, max_step_tokens, **limits),
        policy=policy,
        prefix_cache=prefix_cache,
        states=states,
        step_time=step_time,
        tier=None if make_tier is None else make_tier(pool),
    )


def sequence(name: str, prompt: int | list[int] = 4, max_tokens: int = 8, **fields: Any) -> Sequence:
    """Return a sequence. If `prompt` is a length, its tokens are unlike those of all others."""
    ids = [hash((name, i)) % 10**6 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(name, 0, ids, SamplingParams(), max_len=len(ids) + max_tokens, **fields)


def launched(scheduler: Scheduler) -> Step:
    """Launch the next step, whose results may come later or never."""
    step = scheduler.schedule()
    scheduler.advance(step)
    return step


NEVER = -1  # stands for a token that is not drawn


class Cache:
    """Keys and values of a device without a model: a slot holds the token that would be in it, and all before it.

    So does a state.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}  # by block, and place in it
        self.states: dict[int, tuple[int, ...]] = {}

    def slots_of(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        return [(sequence.blocks[place // self._size], place % self._size) for place in range(start, end)]

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.slots |= {(target, i): self.slots.get((source, i), ()) for i in range(self._size)}

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self.states[target] = self.states[source]

    def compute(self, step: Step, ids_of: dict[Sequence, list[int]]) -> None:
        """Write the tokens of all chunks, and check that each sequence attends to its own, and has their state."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            ids = ids_of[chunk.sequence]
            assert chunk.end == len(ids)
            for position, slot in enumerate(self.slots_of(sequence, chunk.start, chunk.end), chunk.start):
                self.slots[slot] = tuple(ids[: position + 1])
            if sequence.state is not None:
                result = self.states[sequence.state] if chunk.start else ()
                assert result == tuple(ids[: chunk.start]), f"the state of {sequence.request_id} is of other tokens"
                self.states[sequence.state] = tuple(ids)
        for chunk in step.chunks:
            sequence = chunk.sequence
            ids = ids_of[chunk.sequence]
            for position, slot in enumerate(self.slots_of(sequence, 0, chunk.end)):
                assert self.slots[slot] == tuple(ids[: position + 1]), f"position {position} of {sequence.request_id}"


class Memory:
    """A device that computes steps in their order.

    With overlap, the results of a step are committed when the next one has been launched. `last_token` ends a sequence,
    which the scheduler cannot know before. `forced` returns tokens that come behind those that were drawn.
    """

    overlap = False
    forced: Callable[[Sequence], list[int]] = staticmethod(lambda _: [])

    def __init__(self, scheduler: Scheduler, *, last_token: int | None = None, cache: Any = None) -> None:
        self.scheduler = scheduler
        self.last_token = last_token
        self._cache = cache or Cache(scheduler.pool.block_size)
        self.num_computed = 0  # tokens, in all
        self.num_drafted = 0  # tokens of drafts among these
        self.num_accepted = 0  # tokens of drafts that came true
        self._drawn: dict[Sequence, list[int]] = {}  # ids that the scheduler does not know yet
        # The step in flight, and the ids that it draws for sequences that are still there.
        self._in_flight = Step(), dict[Sequence, list[int]]()

    def add(self, *sequences: Sequence) -> None:
        for one in sequences:
            self.scheduler.add(one)

    def add_choices(self, first: Sequence, *others: Sequence) -> None:
        """Add choices of one prompt, which the first one computes for all."""
        self.scheduler.add(first)
        for one in others:
            self.scheduler.add(one, first)

    def run(self, next_token: int = 7) -> list[tuple[str, int]]:
        step = self.scheduler.schedule()
        if step is None:
            self.settle()
            step = self.scheduler.schedule()  # Some sequences were held.
        return [] if step is None else self.execute(step, next_token)

    def execute(self, step: Step, next_token: int | Callable[[Sequence], int | list[int]] = 7) -> list[tuple[str, int]]:
        """Compute a step, and draw one token or a list of tokens for each chunk that draws, as far as it may."""
        self._compute(step)
        drawn = {chunk.sequence: self._draw(chunk, next_token) for chunk in step.chunks}
        self.scheduler.advance(step)
        self.scheduler.check_integrity()
        if self.overlap:
            before = self._in_flight
            self._in_flight = (step, drawn)
            self._commit(*before)
            self.scheduler.settle(step)
        else:
            self._commit(step, drawn)
        return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]

    def settle(self) -> None:
        """Commit the step in flight."""
        before = self._in_flight
        self._in_flight = (Step(), {})
        self._commit(*before)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that ends. What steps in flight draw for it is lost."""
        self.scheduler.remove(sequence)
        self._in_flight[1].pop(sequence, None)
        self._drawn.pop(sequence, None)

    def is_in_flight(self, sequence: Sequence) -> bool:
        return sequence in self._in_flight[1]

    def run_out(self) -> None:
        """Run steps until nothing is left to compute. Sequences leave at their max_len."""
        while self.run():
            pass

    def _ids(self, sequence: Sequence) -> list[int]:
        return [*sequence.token_ids, *self._drawn.get(sequence, ())]

    def _draw(self, chunk: Chunk, next_token: int | Callable[[Sequence], int | list[int]]) -> list[int]:
        sequence = chunk.sequence
        ids = self._ids(chunk.sequence)
        assert (chunk.max_draws > 0) == (chunk.known_end >= len(ids))
        if not chunk.max_draws or sequence.max_len == sequence.prompt_len:
            return []
        assert chunk.known_end + chunk.max_draws <= sequence.max_len
        if chunk.known_end > len(ids):
            return [NEVER] * chunk.max_draws
        drawn = next_token if isinstance(next_token, int) else next_token(sequence)
        tokens = drawn[: chunk.max_draws] if isinstance(drawn, list) else [drawn]
        self._drawn.setdefault(sequence, []).extend(tokens)
        return tokens

    def _compute(self, step: Step) -> None:
        self._cache.copy_blocks(step.copies)
        self._cache.copy_states(step.state_copies)
        # The device writes something even for a token that the step before was expected to draw, and did not.
        ids_of = {
            chunk.sequence: [*[*self._ids(chunk.sequence), NEVER][: chunk.known_end], *chunk.draft]
            for chunk in step.chunks
        }
        for chunk in step.chunks:
            assert not chunk.sequence.is_held
            assert (chunk.sequence.state is None) == (self.scheduler.states is None)
            self.num_computed += chunk.num_tokens
            self.num_drafted += len(chunk.draft)
        self._cache.compute(step, ids_of)

    def _commit(self, step: Step, drawn: dict[Sequence, list[int]]) -> None:
        for chunk in step.chunks:
            sequence = chunk.sequence
            if sequence not in drawn:
                continue  # it has been removed
            tokens = drawn[sequence]
            assert (chunk.draw in (Draw.AT_LAUNCH, Draw.LATE)) == (_standing(chunk) == 0), "it was settled, for good"
            if chunk.draw is Draw.VOID:
                assert _standing(chunk) > 0
                continue
            if chunk.draw is Draw.SUPERSEDED:
                assert _standing(chunk) < 0
                before = (sequence.token_ids.copy(), sequence.num_tokens, sequence.num_computed, sequence.place)
                self.scheduler.commit(chunk, [])
                assert before == (sequence.token_ids, sequence.num_tokens, sequence.num_computed, sequence.place)
                continue
            assert self._drawn.get(sequence, [])[: len(tokens)] == tokens
            if tokens:
                del self._drawn[sequence][: len(tokens)]
            if tokens and self.last_token not in tokens:
                forced = self.forced(sequence)[: sequence.max_len - chunk.known_end - len(tokens)]
                tokens = [*tokens, *forced]
                if forced and sequence in self._drawn:
                    del self._drawn[sequence]  # what the step in flight draws is dropped
            if self.last_token in tokens:
                tokens = tokens[: tokens.index(self.last_token) + 1]  # what comes after the end does not count
            self.num_accepted += chunk.num_accepted(tokens)
            self.scheduler.commit(chunk, tokens)
            assert sequence.num_pending == len(self._drawn.get(sequence, ())) or self.is_in_flight(sequence)
            if self.last_token in tokens or len(sequence.token_ids) == sequence.max_len:
                self.remove(sequence)
        self.scheduler.check_integrity()


def _standing(chunk: Chunk) -> int:
    """Return how many tokens a chunk that draws is ahead of its sequence: 0 if its draw is the next token."""
    return chunk.known_end - len(chunk.sequence.token_ids) if chunk.max_draws else 0


def memory_of(*sequences: Sequence, **options: Any) -> Memory:
    """Return a device whose scheduler has these sequences. The options are those of `make`."""
    memory = Memory(make(**options))
    memory.add(*sequences)
    return memory
