"""The inputs of a captured step: their places in one int64 tensor, and the numbers of a step in that order."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch

from oaiserve.engine.model.batch import aligned_size, lists_of
from oaiserve.engine.model.gpu.step_sizes import Size
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow, numbers, seeds
from oaiserve.engine.model.states import States
from oaiserve.engine.model.transfer import pinned
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step

T = TypeVar("T")
_PARAMETER_PADDING = GREEDY[:-1]  # all parameters except for the seed


class InputViews(NamedTuple):
    """The inputs of one size on the device, as in `Batch`."""

    seeds: torch.Tensor  # [R], seeds of the draws' noise
    parameters: torch.Tensor  # float32 [4, R], parameters of draws
    ids: torch.Tensor  # [T], the ids that the host knows
    sources: torch.Tensor  # [T], the place of each token's id in the tensor of all inputs: in `ids`, or among drawn ids
    positions: torch.Tensor
    slots: torch.Tensor  # -1 for padding, and next to prompts also for decodes
    adapters: torch.Tensor  # [T], the number of each token's adapter; 0 for none
    table_rows: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    places: torch.Tensor  # [B], places of states, if layers have any
    decode_slots: torch.Tensor  # the slots of decodes next to prompts, -1 for padding


class StepInputs:
    """The places of the inputs of one size, from word `first` on."""

    def __init__(self, size: Size, first: int, states: States | None) -> None:
        self._first = first
        self._size = size
        self._has_states = states is not None
        num_tokens = size.num_tokens
        number = size.num_sequences
        self._width = aligned_size(number)
        self._parameters = first + self._width
        # Two parameters fit into one int64. `begin` is the first word after the inputs of draws.
        self.begin = self._parameters + len(_PARAMETER_PADDING) * self._width // 2
        # The size and the padding of each column that is not for draws.
        self._columns = [
            *((num_tokens, filler) for filler in (0, self.begin, 0, -1, 0)),
            *((number, 0), (number + 1, 0), (number, 0), (number, 0)),
            (0, 0) if states is None else (number, states.last),
            (size.rows if size.tokens else 0, -1),
        ]
        self.end = self.begin + sum(aligned_size(column) for column, _ in self._columns)

    def views(self, words: torch.Tensor) -> InputViews:
        number = self._size.num_sequences
        parameters = words[self._parameters : self.begin].view(torch.float32).view(len(_PARAMETER_PADDING), -1)
        views = [words[self._first : self._first + number], parameters[:, :number]]
        begin = self.begin
        for column, _ in self._columns:
            views.append(words[begin : begin + column])
            begin += aligned_size(column)
        return InputViews(*views)

    def upload(
        self,
        words: torch.Tensor,
        step: Step,
        block_size: int,
        table_rows: list[int],
        drawn_rows: Mapping[Sequence, int],
        rows: list[DrawRow],
        adapters: list[int],
    ) -> None:
        """Copy the inputs of a step, with padding, into `words` on the device. `rows` are the parameters of its first
        draws; the other draws are greedy. `adapters` has a number for each chunk, unless all are 0."""
        lists = lists_of(step, block_size, drawn_rows)
        num_decodes = lists.num_decodes
        missing = self._size.rows - num_decodes

        def spread(values: list[int], filler: int = 0) -> list[int]:
            """Put padding between the sequences of one token and the others."""
            return [*values[:num_decodes], *[filler] * missing, *values[num_decodes:]]

        sources = list(range(self.begin, self.begin + len(lists.input_ids)))
        for row, drawn in zip(lists.unknown_rows, lists.drawn_rows, strict=True):
            sources[row] = drawn
        # Sequences of padding have no tokens.
        starts = spread(lists.query_start, num_decodes)
        starts += [starts[-1]] * (self._size.num_sequences + 1 - len(starts))
        slots = lists.slots
        decode_slots: list[int] = []
        if self._size.tokens:
            decode_slots = slots[:num_decodes]
            slots[:num_decodes] = [-1] * num_decodes
        of_chunks = zip(step.chunks, adapters, strict=False)
        of_tokens = [number for chunk, number in of_chunks for _ in range(chunk.num_tokens)]
        columns = [
            *(lists.input_ids, sources, lists.positions, slots, of_tokens),
            *(spread(table_rows), starts, spread([chunk.end for chunk in step.chunks])),
            lists.logits_rows,
            [chunk.sequence.state or 0 for chunk in step.chunks] if self._has_states else [],
            decode_slots,
        ]
        packed = array("q", self._padded(seeds(rows).tolist(), GREEDY.seed))
        for values, filler in zip(numbers(rows).tolist(), _PARAMETER_PADDING, strict=True):
            packed.frombytes(array("f", self._padded(values, filler)).tobytes())
        padded: list[int] = []
        end = 0
        for values, (column, filler) in zip(columns, self._columns, strict=True):
            padded += values
            end += aligned_size(column)
            padded += [filler] * (end - len(padded))
        packed.extend(padded)
        on_device = words[self._first : self.end]
        on_device.copy_(pinned(torch.frombuffer(packed, dtype=torch.int64), on_device.device), non_blocking=True)

    def _padded(self, values: list[T], filler: T) -> list[T]:
        return [*values, *[filler] * (self._width - len(values))]
