"""The model of the world, whose answers show when a block of the KV cache has the wrong tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from oaiserve.engine.sequences.step import Chunk, ChunkResult, Masks, Step, StepResult
from tests.engine.doubles import EOS, LETTERS, TOKENIZER
from tests.world.loop import World

GONE = "the device is gone"  # an error that a fault makes
NUM_KEYS = 8  # kinds of draw keys: answers of requests without a seed are one of these
_E_ACUTE = TOKENIZER.backend.token_to_id("Ã"), TOKENIZER.backend.token_to_id("©")  # the two bytes of é
_MASK = (1 << 64) - 1


def _mixed(before: int, number: int) -> int:
    bits = (before ^ number + 1) * 0x9E3779B97F4A7C15 & _MASK
    return bits ^ bits >> 29


@dataclass(eq=False)
class Launched:
    """A step, the blocks that its sequences had when it was launched, and its results."""

    step: Step
    blocks: list[list[int]]
    results: list[ChunkResult] | None = None


class Model:
    """A model whose token follows from all tokens before, as it finds them in the blocks of the KV cache.

    A slot of a block has a digest of the tokens up to its own. A step takes simulated time."""

    is_exact = True

    def __init__(self, world: World, block_size: int, step_seconds: float, *, is_asynchronous: bool = False) -> None:
        """Make the model. An asynchronous one computes steps and copies in the order of their launches, but only when
        the results of a step are collected."""
        self.is_asynchronous = is_asynchronous
        self._world = world
        self._size = block_size
        self._slots: dict[int, list[int]] = {}
        self._launched: deque[Callable[[], None]] = deque()
        self.step_seconds = step_seconds
        self.stuck_seconds = 0.0  # extra time of the next step
        self.is_gone = False  # as a device that has fallen off its bus

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        def copy() -> None:
            for source, target in copies:
                self._slots[target] = [*self._slots.get(source, [0] * self._size)]

        self._launch(copy)

    def launch(self, step: Step) -> Launched:
        if self.is_gone:
            raise RuntimeError(GONE)
        launched = Launched(step, [[*chunk.sequence.blocks] for chunk in step.chunks])
        self._launch(lambda: self._compute(launched))
        return launched

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        pass

    def collect(self, launched: Launched) -> StepResult:
        while launched.results is None:
            self._launched.popleft()()
        self._world.ahead += self.step_seconds + 0.0002 * launched.step.num_tokens + self.stuck_seconds
        self.stuck_seconds = 0.0
        return StepResult(launched.results)

    def _launch(self, work: Callable[[], None]) -> None:
        if self.is_asynchronous:
            self._launched.append(work)
        else:
            work()

    def _compute(self, launched: Launched) -> None:
        chunks = zip(launched.step.chunks, launched.blocks, strict=True)
        launched.results = [self._computed(chunk, blocks) for chunk, blocks in chunks]

    def _computed(self, chunk: Chunk, blocks: list[int]) -> ChunkResult:
        sequence = chunk.sequence
        size = self._size
        ids = sequence.token_ids
        if len(ids) < chunk.end:  # It ended with the step before, which was not known when this one was launched.
            return ChunkResult([EOS])
        result = self._slots[blocks[(chunk.start - 1) // size]][(chunk.start - 1) % size] if chunk.start else 0
        for position in range(chunk.start, chunk.end):
            result = _mixed(result, ids[position])
            self._slots.setdefault(blocks[position // size], [0] * size)[position % size] = result
        if not chunk.max_draws:
            return ChunkResult()
        for block in blocks[: (chunk.end - 1) // size]:  # attention reads them all
            result ^= self._slots[block][-1]
        return ChunkResult([self._token(ids[chunk.end - 1], _mixed(result, sequence.draw_key % NUM_KEYS))])

    def _token(self, last: int, drawn: int) -> int:
        if last == _E_ACUTE[0]:
            return _E_ACUTE[1]
        if drawn % 97 == 0:
            return EOS
        return _E_ACUTE[0] if drawn % 11 == 0 else LETTERS[drawn % 26]
