"""A device without a model, for tests of the scheduler: a memory of token ids stands for keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.policy import fcfs
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.engine.step import Chunk, Step


def make(
    kv_blocks: int = 16,
    block_size: int = 4,
    max_running: int = 4,
    max_step_tokens: int = 8,
    policy: Any = fcfs,
    prefix_cache: bool = True,
    **limits: Any,
) -> Scheduler:
    pool = BlockPool(kv_blocks, block_size)
    return Scheduler(pool, Limits(max_running, max_step_tokens, **limits), policy=policy, prefix_cache=prefix_cache)


def sequence(name: str, prompt: int | list[int] = 4, max_tokens: int = 8, **fields: Any) -> Sequence:
    """With a prompt of its own where only the length is given."""
    ids = [hash((name, i)) % 10**6 for i in range(prompt)] if isinstance(prompt, int) else prompt
    return Sequence(name, 0, ids, SamplingParams(), max_len=len(ids) + max_tokens, **fields)


class Memory:
    """Computes steps in their order. A slot holds the token whose keys and values would be there, and all before it.

    With overlap, the results of a step are committed when the next one has been launched. `last_token` ends a sequence,
    which the scheduler cannot know before."""

    overlap = False

    def __init__(self, scheduler: Scheduler, *, last_token: int | None = None) -> None:
        self.scheduler = scheduler
        self.last_token = last_token
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.num_computed = 0  # tokens, in all
        self._drawn: dict[Sequence, list[int]] = {}  # ids that the scheduler does not know yet
        self._in_flight: list[tuple[Chunk, int | None]] = []

    def run(self, next_token: int = 7) -> list[tuple[str, int]]:
        step = self.scheduler.schedule()
        if step is None:
            self.settle()
            return []
        return self.execute(step, next_token)

    def execute(self, step: Step, next_token: int | Callable[[Sequence], int] = 7) -> list[tuple[str, int]]:
        self._compute(step)
        drawn: list[tuple[Chunk, int | None]] = []
        for chunk in step.chunks:
            token = None
            if chunk.samples and chunk.sequence.max_len > chunk.sequence.prompt_len:
                token = next_token if isinstance(next_token, int) else next_token(chunk.sequence)
                self._drawn.setdefault(chunk.sequence, []).append(token)
            drawn.append((chunk, token))
        self.scheduler.advance(step)
        self.scheduler.check_integrity()
        if self.overlap:
            drawn, self._in_flight = self._in_flight, drawn
        self._commit(drawn)
        return [(chunk.sequence.request_id, chunk.num_tokens) for chunk in step.chunks]

    def settle(self) -> None:
        """Commits the step under way."""
        drawn, self._in_flight = self._in_flight, []
        self._commit(drawn)

    def remove(self, sequence: Sequence) -> None:
        """For a reason of its own. What steps under way draw for it is lost."""
        self.scheduler.remove(sequence)
        self._in_flight = [(chunk, token) for chunk, token in self._in_flight if chunk.sequence is not sequence]
        self._drawn.pop(sequence, None)

    def run_out(self) -> None:
        """Until nothing is left to do; sequences leave at their max_len."""
        while self.run():
            pass

    def _ids(self, sequence: Sequence) -> list[int]:
        ids = [*sequence.token_ids, *self._drawn.get(sequence, ())]
        assert len(ids) == sequence.num_tokens
        return ids

    def _compute(self, step: Step) -> None:
        size = self.scheduler.pool.block_size
        copied = {
            (new, i): self.slots[old, i] for old, new in step.copies for i in range(size) if (old, i) in self.slots
        }
        self.slots |= copied
        for chunk in step.chunks:
            blocks, ids = chunk.sequence.blocks, self._ids(chunk.sequence)
            assert chunk.samples == (chunk.end == len(ids))
            assert chunk.end <= len(ids)
            for position in range(chunk.start, chunk.end):
                self.slots[blocks[position // size], position % size] = tuple(ids[: position + 1])
            self.num_computed += chunk.num_tokens
        for chunk in step.chunks:
            blocks, ids = chunk.sequence.blocks, self._ids(chunk.sequence)
            for position in range(chunk.end):
                found = self.slots[blocks[position // size], position % size]
                assert found == tuple(ids[: position + 1]), f"position {position} of {chunk.sequence.request_id}"

    def _commit(self, drawn: list[tuple[Chunk, int | None]]) -> None:
        for chunk, token in drawn:
            if token is not None:
                assert self._drawn[chunk.sequence].pop(0) == token
            self.scheduler.commit(chunk, token)
            if token is not None and token == self.last_token and chunk.sequence.place is not Place.NOWHERE:
                self.remove(chunk.sequence)
        self.scheduler.check_integrity()
