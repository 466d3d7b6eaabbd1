"""The device has the block tables of each step, and gets only what is new of them."""

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor import block_tables
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from tests.engine.model.steps import CPU, sequence_of

BLOCK_SIZE = 4
MOST = 3


def sequence(num_blocks: int, first: int = 0) -> Sequence:
    return sequence_of([0], range(first, first + num_blocks))


def check(tables: BlockTables, step: Step) -> list[int]:
    """Update the tables, and assert that they have the blocks of the step. Return the rows."""
    rows = tables.update(step)
    assert len(set(rows)) == len(rows)
    for row, chunk in zip(rows, step.chunks, strict=True):
        number = (chunk.end - 1) // BLOCK_SIZE + 1
        assert tables.on_device[row, :number].tolist() == chunk.sequence.blocks[:number]
    return rows


class Machine(RuleBasedStateMachine):
    """Sequences grow, lose their blocks, get copies of blocks, and come and go, as the scheduler lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(MOST, 12, BLOCK_SIZE, CPU)
        self.sequences = [sequence(0) for _ in range(6)]
        self.lengths = [0] * 6
        self.next_block = 0

    def _blocks(self, number: int) -> list[int]:
        self.next_block += number
        return list(range(self.next_block - number, self.next_block))

    @rule(
        indices=st.lists(st.integers(0, 5), min_size=1, max_size=MOST, unique=True), counts=st.lists(st.integers(1, 9))
    )
    def compute(self, indices: list[int], counts: list[int]) -> None:
        step = Step()
        for index, count in zip(indices, [*counts, 1, 1, 1], strict=False):
            start = self.lengths[index]
            one = self.sequences[index]
            count = min(count, 12 * BLOCK_SIZE - start)
            if count:
                one.blocks += self._blocks(max(0, -(-(start + count) // BLOCK_SIZE) - len(one.blocks)))
                step.chunks.append(Chunk(one, start, count))
                self.lengths[index] += count
        if step.chunks:
            check(self.tables, step)

    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        self.sequences[index].blocks = []
        self.lengths[index] = 0

    @rule(index=st.integers(0, 5))
    def copy_the_block_that_is_written_next(self, index: int) -> None:
        place = self.lengths[index] // BLOCK_SIZE
        if place < len(self.sequences[index].blocks):
            (self.sequences[index].blocks[place],) = self._blocks(1)

    @rule(index=st.integers(0, 5))
    def end(self, index: int) -> None:
        self.preempt(index)
        self.sequences[index] = sequence(0)

    @rule()
    def fail(self) -> None:
        self.tables.forget()

    @invariant()
    def each_row_is_free_or_in_use(self) -> None:
        in_use = [row.index for row in self.tables._rows.values()]
        assert sorted(in_use + self.tables._free) == list(range(MOST))


TestAnyOrder = Machine.TestCase
TestAnyOrder.settings = settings(max_examples=25, stateful_step_count=20)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the numbers of entries that each copy to the device has."""
    numbers: list[int] = []
    on_device = block_tables.on_device

    def count(values: list[list[int]], device: torch.device) -> Any:
        numbers.append(len(values[0]))
        return on_device(values, device)

    monkeypatch.setattr(block_tables, "on_device", count)
    return numbers


def test_a_step_of_decodes_copies_only_blocks_that_have_been_begun(copied: list[int]) -> None:
    even = [sequence(20, first=100 * i) for i in range(4)]
    uneven = [sequence(9000), *even[1:]]
    for sequences, num_blocks in ((even, 20), (uneven, 9000)):
        tables = BlockTables(4, 9000, BLOCK_SIZE, CPU)
        starts = [len(one.blocks) * BLOCK_SIZE - 6 for one in sequences]
        copied.clear()
        for number in range(6):
            check(tables, Step([Chunk(one, start + number, 1) for one, start in zip(sequences, starts, strict=True)]))
        assert copied == [num_blocks - 1 + 3 * 19, 4]  # all of them once, and then a block of each, when it begins
