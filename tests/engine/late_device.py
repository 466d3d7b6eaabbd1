"""A device whose streams do their work as late as they may, and a KV cache in its memory.

Nothing runs before somebody waits for it, or a test lets a stream go on. So copies that forget to wait read or write
too early or too late, and a step then finds the keys and values of other tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import RLock
from typing import NamedTuple

import torch

from oaiserve.engine.model.block_copies import BlockCopies, Streams
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step


class LateStream:
    def __init__(self, lock: RLock) -> None:
        self._work: deque[Callable[[], object]] = deque()
        self._num_begun = 0
        self._lock = lock  # one for all streams of a device

    def run(self, work: Callable[[], object]) -> None:
        with self._lock:
            self._work.append(work)

    def mark(self) -> Moment:
        with self._lock:
            return Moment(self, self._num_begun + len(self._work))

    def wait(self, moment: Moment) -> None:
        self.run(moment.synchronize)

    def go_on(self, end: int | None = None) -> None:
        """Do the work up to the `end`, or the next piece of work."""
        with self._lock:
            end = self._num_begun + 1 if end is None else end
            while self._work and self._num_begun < end:
                self._num_begun += 1
                self._work.popleft()()


class Moment(NamedTuple):
    stream: LateStream
    end: int

    def synchronize(self) -> None:
        self.stream.go_on(self.end)


class LateCache:
    """Keys and values that steps write and check when their stream gets there: hashes of all tokens so far.

    It takes the place of `tests.engine.memory.Cache`. Sequences with different salts have different keys and values.
    """

    def __init__(self, num_blocks: int, block_size: int, num_slots: int) -> None:
        self._size = block_size
        lock = RLock()
        self.streams = Streams(LateStream(lock), LateStream(lock), LateStream(lock))
        # Two layers, of which one has keys alone.
        self.tensors = [torch.zeros((num_blocks, block_size), dtype=torch.int64) for _ in range(3)]
        self.copies = BlockCopies(self.tensors, num_slots * 3 * 8 * block_size, self.streams)
        self.ended: dict[int, Moment] = {}  # the ends of steps, by their ids
        self.num_checked = 0  # places that steps have read

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pairs = copies.copy()

        def copy() -> None:
            for source, target in pairs:
                for number, tensor in enumerate(self.tensors):
                    self.tensors[number][target] = tensor[source]

        self.streams.steps.run(copy)

    def copy_states(self, copies: list[tuple[int, int]]) -> None:
        assert not copies

    def compute(self, step: Step, ids_of: dict[Sequence, list[int]]) -> None:
        chunks = [(chunk.start, self._places(chunk.sequence, ids_of[chunk.sequence])) for chunk in step.chunks]

        def compute() -> None:
            for start, places in chunks:
                for block, place, number in places[start:]:
                    for layer, tensor in enumerate(self.tensors):
                        tensor[block, place] = number ^ layer
            for _, places in chunks:
                for block, place, number in places:
                    assert [int(tensor[block, place]) for tensor in self.tensors] == [number, number ^ 1, number ^ 2]
                    self.num_checked += 1

        self.streams.steps.run(compute)
        self.ended[id(step)] = self.streams.steps.mark()

    def _places(self, sequence: Sequence, ids: list[int]) -> list[tuple[int, int, int]]:
        """Return block, place in it, and content of each token."""
        size = self._size
        return [
            (sequence.blocks[place // size], place % size, hash((sequence.cache_salt, *ids[: place + 1])))
            for place in range(len(ids))
        ]

    def collect(self, step: Step) -> None:
        """Wait for a step, as the host does for its results."""
        if (ended := self.ended.pop(id(step), None)) is not None:
            ended.synchronize()
