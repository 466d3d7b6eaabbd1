"""The sequences' block tables on the device. The host sends only new entries.

Each sequence has a row for as long as steps compute it. A decode needs a new entry only when it begins a block, so the
host sends nothing for most steps, however long the sequences are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch

from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Step

LEAST_ROWS = 4  # Warm-up and comparison steps have this many sequences, even if fewer may run.


@dataclass(slots=True)
class _Row:
    """Which entries of a sequence's blocks are on the device."""

    index: int
    blocks: list[int]  # the sequence's own list; a sequence that loses its blocks gets a new list
    num_known: int = 0  # number of blocks on the device
    last: int = 0  # the last of these blocks


class BlockTables:
    """Tables for up to `most` sequences, each with up to `width` blocks of `block_size` tokens.

    Launched work reads the entries as of its launch, because all copies are in stream order.
    """

    def __init__(self, most: int, width: int, block_size: int, device: torch.device) -> None:
        self.on_device = torch.zeros(most, width, dtype=torch.int64, device=device)
        self._width = width
        self._block_size = block_size
        self._rows: dict[Sequence, _Row] = {}
        self._free = list(range(most))

    @property
    def most_tokens(self) -> int:
        """Return the most tokens that a sequence may have."""
        return self._width * self._block_size

    @classmethod
    def with_room(cls, max_running: int, max_model_len: int, block_size: int, device: torch.device) -> Self:
        """Create the tables for `max_running` sequences of `max_model_len` tokens each."""
        return cls(max(max_running, LEAST_ROWS), -(-max_model_len // block_size), block_size, device)

    def update(self, step: Step) -> list[int]:
        """Copy the new entries of a step to the device, without waiting. Return the row of each chunk."""
        try:
            rows, places, blocks = self._new(step)
            if places:
                on_both = on_device([places, blocks], self.on_device.device)
                self.on_device.view(-1).index_copy_(0, on_both[0], on_both[1])
        except BaseException:
            self.forget()  # After a failure, the entries on the device are unknown.
            raise
        return rows

    @property
    def num_rows(self) -> int:
        return len(self.on_device)

    def row_of(self, sequence: Sequence) -> int:
        """Return the row of a sequence of the step that was updated last."""
        return self._rows[sequence].index

    def forget(self) -> None:
        """Mark all entries as missing on the device, so that the next step copies all of them."""
        self._free += [row.index for row in self._rows.values()]
        self._rows.clear()

    def _new(self, step: Step) -> tuple[list[int], list[int], list[int]]:
        """Return the rows of a step, and the places and values of new entries in the flat tables."""
        rows: list[int] = []
        places: list[int] = []
        values: list[int] = []
        known = self._rows
        block_size = self._block_size
        for sequence, start, num_tokens, _, _, _ in step.chunks:
            blocks = sequence.blocks
            first = start // block_size
            last = first if num_tokens == 1 else (start + num_tokens - 1) // block_size
            row = known.get(sequence)
            if row is None:
                if not self._free:
                    computed = {chunk.sequence for chunk in step.chunks}
                    self._release(one for one in known if one not in computed)
                row = known[sequence] = _Row(self._free.pop(), blocks)
            elif row.blocks is not blocks:
                row.blocks = blocks
                row.num_known = 0
            elif first == last == row.num_known - 1 and blocks[last] == row.last:
                rows.append(row.index)
                continue
            # The block that the step writes may have been replaced by a copy. Earlier blocks stay the same.
            first = min(first, row.num_known)
            begin = row.index * self._width
            places += range(begin + first, begin + last + 1)
            values += blocks[first : last + 1]
            row.num_known = last + 1
            row.last = blocks[last]
            rows.append(row.index)
        if len(known) > len(rows):
            self._release(sequence for sequence in known if not sequence.blocks)
        return rows, places, values

    def _release(self, sequences: Iterable[Sequence]) -> None:
        for sequence in list(sequences):
            self._free.append(self._rows.pop(sequence).index)
