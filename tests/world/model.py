"""The model of the world, whose answers show when a block of the KV cache has the wrong tokens."""

from __future__ import annotations

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


class Model:
    """A model whose token follows from all tokens before, as it finds them in the blocks of the KV cache.

    A slot of a block has a digest of the tokens up to its own. A step takes simulated time."""

    is_exact = True
    is_asynchronous = False

    def __init__(self, world: World, block_size: int, step_seconds: float) -> None:
        self._world = world
        self._size = block_size
        self._slots: dict[int, list[int]] = {}
        self.step_seconds = step_seconds
        self.stuck_seconds = 0.0  # extra time of the next step
        self.is_gone = False  # as a device that has fallen off its bus

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, target in copies:
            self._slots[target] = [*self._slots.get(source, [0] * self._size)]

    def launch(self, step: Step) -> tuple[Step, StepResult]:
        if self.is_gone:
            raise RuntimeError(GONE)
        return step, StepResult([self._computed(chunk) for chunk in step.chunks])

    def draw(self, launched: tuple[Step, StepResult], masks: Masks | None) -> None:
        pass

    def collect(self, launched: tuple[Step, StepResult]) -> StepResult:
        self._world.ahead += self.step_seconds + 0.0002 * launched[0].num_tokens + self.stuck_seconds
        self.stuck_seconds = 0.0
        return launched[1]

    def _computed(self, chunk: Chunk) -> ChunkResult:
        sequence = chunk.sequence
        size = self._size
        ids = sequence.token_ids
        blocks = sequence.blocks
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
