"""The inputs of a captured step: their places in one int64 tensor, and a step's numbers in that order."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from oaiserve.engine.model.batch import aligned_size, lists_of
from oaiserve.engine.model.states import States
from oaiserve.engine.model.transfer import pinned
from oaiserve.engine.sequences.draw_columns import DRAW_COLUMNS, GREEDY
from oaiserve.engine.sequences.draw_rows import draw_columns, parameters_of, seeds
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Step
from oaiserve.plugins.cuda.executor.step_sizes import Size


class InputViews(NamedTuple):
    """The inputs of one size on the device, as in `Batch`."""

    seeds: torch.Tensor  # [R], seeds of the draws' noise
    parameters: torch.Tensor  # float32 [columns, R], parameters of draws
    ids: torch.Tensor  # [T], the ids that the host knows
    sources: torch.Tensor  # [T], the index of each token's id in the tensor of all inputs: in `ids`, or among drawn ids
    positions: torch.Tensor
    slots: torch.Tensor  # -1 for padding, and next to prompts also for decodes
    adapters: torch.Tensor  # [T], the number of each token's adapter; 0 for none
    table_rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    places: torch.Tensor  # [B], indices of states, if layers have any
    decode_slots: torch.Tensor  # the slots of decodes next to prompts, -1 for padding
    count_rows: torch.Tensor  # [R], the rows of draws with penalties in the counts; -1 for none


class StepInputs:
    """The places of the inputs of one size, from word `first` on."""

    def __init__(self, size: Size, first: int, block_size: int, states: States | None) -> None:
        self._first = first
        self._size = size
        self._block_size = block_size
        self._has_states = states is not None
        num_tokens = size.num_tokens
        number = size.num_sequences
        self._width = aligned_size(number)
        self._parameters = first + self._width
        # Two parameters fit into one int64. `begin` is the first word after the draws' inputs.
        self.begin = self._parameters + len(DRAW_COLUMNS) * self._width // 2
        # The size and the padding of each column, except those of draws. In steps with only decodes, tokens, sequences
        # and draws have the same rows.
        places = range(self.begin, self.begin + num_tokens)
        padding: list[tuple[int, int | range]] = [
            *((num_tokens, filler) for filler in (0, places, 0, -1, 0)),
            *((number, 0), (number + 1, range(number + 1)), (number, 0)),
            (number, 0 if size.tokens else range(number)),
            (0, 0) if states is None else (number, states.last),
            (size.rows if size.tokens else 0, -1),
            (number, -1),
        ]
        self._columns: list[slice] = []  # places in the tensor of all words
        begin = self.begin
        for num_words, _ in padding:
            self._columns.append(slice(begin, begin + num_words))
            begin += aligned_size(num_words)
        self.end = begin
        self._padding = np.zeros(self.end - first, np.int64)
        self._padding[: self._width] = seeds([GREEDY])
        self._parameters_in(self._padding)[:] = parameters_of([GREEDY])
        for column, (_, filler) in zip(self._columns, padding, strict=True):
            self._padding[column.start - first : column.stop - first] = filler

    def views(self, words: torch.Tensor) -> InputViews:
        number = self._size.num_sequences
        parameters = words[self._parameters : self.begin].view(torch.float32).view(len(DRAW_COLUMNS), -1)
        views = [words[self._first : self._first + number], parameters[:, :number]]
        return InputViews(*views, *(words[column] for column in self._columns))

    def upload(
        self,
        words: torch.Tensor,
        step: Step,
        table_rows: list[int],
        drawn_rows: Mapping[Sequence, int],
        sampled: list[Chunk],
        count_rows: list[int],
        adapters: list[int],
    ) -> None:
        """Copy the inputs of a step, with padding, into `words` on the device.

        `sampled` are its draws, unless all are greedy. `count_rows` has a row for each draw, unless none has penalties,
        and `adapters` a number for each chunk, unless all are 0.
        """
        packed = self._padding.copy()
        if sampled:
            self._parameters_in(packed)[:, : len(sampled)], packed[: len(sampled)] = draw_columns(sampled)
        columns_of = self._of_prompts if self._size.tokens else self._of_decodes
        columns = [*columns_of(step, table_rows, drawn_rows, adapters), count_rows]
        for column, values in zip(self._columns, columns, strict=True):
            if len(values):
                begin = column.start - self._first
                packed[begin : begin + len(values)] = values if isinstance(values, np.ndarray) else _int64(values)
        on_device = words[self._first : self.end]
        on_device.copy_(pinned(torch.from_numpy(packed), on_device.device), non_blocking=True)

    def _of_decodes(
        self, step: Step, table_rows: list[int], drawn_rows: Mapping[Sequence, int], adapters: list[int]
    ) -> list[list[int] | np.ndarray]:
        """Return how each column before `count_rows` begins, for a step with one token of each sequence."""
        ids: list[int] = []
        sources: list[int] = []
        blocks: list[int] = []
        draws: list[int] = []
        after_media: list[tuple[int, int]] = []  # rows with other positions
        block_size = self._block_size
        chunks = step.chunks
        for row, (sequence, start, _, max_draws, _, _) in enumerate(chunks):
            token_ids = sequence.token_ids
            if start < len(token_ids):
                ids += [0] * (row - len(ids))
                ids.append(token_ids[start])
                sources.append(self.begin + row)
            else:
                sources.append(drawn_rows[sequence])
            blocks.append(sequence.blocks[start // block_size])
            if max_draws:
                draws.append(row)
            if sequence.media is not None:
                after_media.append((row, sequence.media.position(start)))
        starts = _int64([chunk[1] for chunk in chunks])
        positions = starts.copy()
        for row, position in after_media:
            positions[row] = position
        slots = _int64(blocks) * block_size + starts % block_size
        states = [chunk.sequence.state or 0 for chunk in chunks] if self._has_states else []
        if len(draws) == len(chunks):
            draws = []  # the padding's values are right for them
        return [ids, sources, positions, slots, adapters, table_rows, [], starts + 1, draws, states, []]

    def _of_prompts(
        self, step: Step, table_rows: list[int], drawn_rows: Mapping[Sequence, int], adapters: list[int]
    ) -> list[list[int] | np.ndarray]:
        """Return how each column before `count_rows` begins, for a step with prompts."""
        lists = lists_of(step, self._block_size, drawn_rows)
        num_decodes = lists.num_decodes
        missing = self._size.rows - num_decodes

        def spread(values: list[int], filler: int = 0) -> list[int]:
            """Insert padding between the sequences of one token and the others."""
            return [*values[:num_decodes], *[filler] * missing, *values[num_decodes:]]

        sources = list(range(self.begin, self.begin + len(lists.input_ids)))
        for row, drawn in zip(lists.unknown_rows, lists.drawn_rows, strict=True):
            sources[row] = drawn
        # Padding sequences have no tokens.
        starts = spread(lists.query_start, num_decodes)
        starts += [starts[-1]] * (self._size.num_sequences + 1 - len(starts))
        decode_slots = lists.slots[:num_decodes]
        lists.slots[:num_decodes] = [-1] * num_decodes
        of_chunks = zip(step.chunks, adapters, strict=False)
        return [
            *(lists.input_ids, sources, lists.positions, lists.slots),
            [number for chunk, number in of_chunks for _ in range(chunk.num_tokens)],
            *(spread(table_rows), starts, spread([chunk.end for chunk in step.chunks])),
            lists.logits_rows,
            [],
            decode_slots,
        ]

    def _parameters_in(self, packed: np.ndarray) -> np.ndarray:
        """Return the draws' parameters in the words of this size, float32 [columns, R]."""
        words = packed[self._width : self.begin - self._first]
        return words.view(np.float32).reshape(len(DRAW_COLUMNS), -1)


def _int64(values: list[int]) -> np.ndarray:
    return np.frombuffer(array("q", values), np.int64)  # A list converts faster to an array than to NumPy's.
