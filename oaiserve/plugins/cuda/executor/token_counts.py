"""Counts the tokens of sequences with penalties on the device. Draws add their ids to these counts.

The host sends the ids of a sequence once, before its first draw, and later only those that no draw has counted: the
tokens of a draft that were accepted, and those that a grammar has forced.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from oaiserve.engine.model.sampling.logit_edits import counts_of, mask_row
from oaiserve.engine.model.sampling.sampled_ids import MOST_COUNT, BitMasks, DeviceEdits, Penalties
from oaiserve.engine.model.transfer import on_device
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Masks
from oaiserve.plugins.cuda.executor.block_tables import BlockTables


class DeviceCounts:
    """Counts of the sequences in `tables`, each in the sequence's row of the tables."""

    def __init__(self, tables: BlockTables, vocab_size: int) -> None:
        device = tables.on_device.device
        self._counts = torch.zeros(tables.num_rows, vocab_size, dtype=torch.int16, device=device)
        self._factors = torch.ones(tables.num_rows, 3, dtype=torch.float32, device=device)
        # Draws without masks read no words. One word is passed anyway, so that no kernel is compiled for the first
        # grammar.
        self._no_words = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._tables = tables
        # For each row: its sequence, and how many tokens of the answer the device will have counted after all launched
        # draws.
        self._counted: list[tuple[Sequence | None, int]] = [(None, 0)] * tables.num_rows

    def penalties(self, rows: torch.Tensor) -> Penalties:
        """Return the penalties of draws with these rows, int64 [R] on the device."""
        return Penalties(self._counts, self._factors, rows)

    def edits_of(self, draws: list[Chunk], masks: Masks | None) -> DeviceEdits:
        """Return the edits for draws that are launched next. Each draw has a row of its own."""
        device = self._counts.device
        words = self._no_words
        of_masks = [-1] * len(draws)
        if masks is not None:
            words = on_device(masks.words.view(np.int32), device, torch.int32)
            of_masks = [mask_row(masks, draw) for draw in draws]
        count_rows, mask_rows = on_device([self.rows_of(draws), of_masks], device)
        return DeviceEdits(self.penalties(count_rows), BitMasks(words, mask_rows))

    def rows_of(self, draws: list[Chunk]) -> list[int]:
        """Update the counts for draws that are launched next, and return the row of each draw.

        The row is -1 if the draw has no penalties, or if the host applies them. A draw is counted once, so each call
        must be followed by its launch.
        """
        rows: list[int] = []
        new: list[tuple[int, Chunk]] = []
        late: list[tuple[int, Chunk, int]] = []  # with the number of counted tokens
        known = self._counted
        row_of = self._tables.row_of
        for draw in draws:
            sequence, start, num_tokens, _, draft, _ = draw
            if draft or not sequence.is_counted:
                rows.append(-1)
                continue
            row = row_of(sequence)
            rows.append(row)
            num_before = start + num_tokens - sequence.prompt_len
            counted_of, num_counted = known[row]
            if counted_of is not sequence or num_counted > num_before:
                new.append((row, draw))
            elif num_counted < num_before:
                late.append((row, draw, num_counted))
        if new or late:
            self._send(new, late)
        for row, draw in zip(rows, draws, strict=True):
            if row >= 0:
                known[row] = draw[0], draw[1] + draw[2] - draw[0].prompt_len + 1
        return rows

    def _send(self, new: list[tuple[int, Chunk]], late: list[tuple[int, Chunk, int]]) -> None:
        """Copy the ids of new sequences, and the uncounted ids of others, to the device, without waiting."""
        counts = self._counts
        vocab_size = counts.shape[1]
        places: list[int] = []
        amounts: list[int] = []
        for row, draw in new:
            of_draw = counts_of(draw)
            places += [row * vocab_size + token_id for token_id in of_draw.ids]
            amounts += [2 * times + (place < of_draw.num_of_prompt) for place, times in enumerate(of_draw.times)]
        for row, draw, num_counted in late:
            sequence = draw.sequence
            times_of = Counter(sequence.token_ids[sequence.prompt_len + num_counted : draw.end])
            places += [row * vocab_size + token_id for token_id in times_of]
            amounts += [2 * times for times in times_of.values()]
        if new:
            rows = on_device([row for row, _ in new], counts.device)
            counts.index_fill_(0, rows, 0)
            params = [draw.sequence.params for _, draw in new]
            factors = [[its.repetition_penalty, its.frequency_penalty, its.presence_penalty] for its in params]
            self._factors.index_copy_(0, rows, on_device(factors, counts.device, torch.float32))
        if places:
            on_both = on_device([places, amounts], counts.device)
            flat = counts.view(-1)
            sums = flat.index_select(0, on_both[0]) + on_both[1]
            flat.index_copy_(0, on_both[0], sums.clamp_max(MOST_COUNT).to(torch.int16))


def num_count_bytes(vocab_size: int) -> int:
    """Return the memory of the counts of one sequence."""
    return vocab_size * torch.int16.itemsize
