"""Runs decode steps as graphs: a step is launched as two graphs instead of hundreds of kernels.

`decode_forwards` has the first of the two, the forward; here are its inputs, and the draws. `graph_capture` decides on
captures; `ModelRunner` runs all other steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import torch

from oaiserve.engine.model.gpu.decode_forwards import (
    INPUT_PADDING,
    PARAMETER_PADDING,
    Capture,
    DecodeForwards,
    Run,
    aligned_size,
)
from oaiserve.engine.model.sampling.draw_rows import DrawRow, draw_row, numbers, seeds
from oaiserve.engine.model.sampling.logit_edits import is_edited
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.model.transfer import ReadBack, pinned
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Draws:
    """The graphs of draws for one number of rows: one for each kind of sampling.

    With the forward in the same graph, it would have to be captured again for each kind of sampling, and once more for
    steps with edits of logits in between. The second launch takes some microseconds of the host, while the device runs
    the first.
    """

    take_best: Run
    draw: Run
    draw_with_cuts: Run


class Replayed:
    """The drawn tokens of a replayed step, while the device computes them. Other steps have a `Sampling` instead.

    `drawn` is int64. It has the ids of the step's rows first, and from `first_finite` on whether their logits were
    finite.
    """

    def __init__(self, drawn: torch.Tensor, num_rows: int, first_finite: int) -> None:
        self.token_ids = drawn[:num_rows]  # on the device; the next replayed step overwrites them
        self._num_rows, self._first_finite = num_rows, first_finite
        results = drawn[: first_finite + num_rows]
        # On a CPU, where nothing is copied to the host, the next step would overwrite the results.
        self.read_back = ReadBack([results if results.is_cuda else results.clone()])

    def wait(self) -> Sampled:
        """Return the results once they are on the host."""
        (results,) = self.read_back.wait()
        num_rows, are_finite = self._num_rows, results[self._first_finite :] != 0
        return Sampled(results[:num_rows].tolist(), are_finite.tolist(), [None] * num_rows, [])


class DecodeGraphs:
    """The decode steps that `forwards` can replay, and their draws. No step has more rows than the largest size.

    `sampler` is the module `triton_sampling`, whose draws can be captured. The KV cache has blocks of `block_size`
    tokens. The constructor raises the errors of `capture`.
    """

    @torch.inference_mode()
    def __init__(self, forwards: DecodeForwards, sampler: ModuleType, capture: Capture, *, block_size: int) -> None:
        self.tables = forwards.tables
        self._forwards = forwards
        self._sampler = sampler
        self._block_size = block_size
        self._vocab_size = forwards.logits.shape[1]
        self._token_ids: torch.Tensor | None = None  # the ids of the step that was replayed last
        self._draws = {size: self._capture(size, capture) for size in reversed(forwards.sizes)}

    def num_replayed(self, step: Step) -> int:
        """Return the number of a step's decodes, its first chunks, or 0 if one of them cannot be replayed."""
        number = 0
        for sequence, _, num_tokens, max_draws, _, _ in step.chunks:
            if num_tokens > 1:
                break
            if not max_draws or sequence.wants_prompt_logprobs:
                return 0
            number += 1
        return number if number <= self._forwards.sizes[-1] else 0

    def launch(
        self,
        step: Step,
        table_rows: list[int],
        drawn_ids: torch.Tensor | None,
        drawn_rows: Mapping[Sequence, int],
        began: torch.cuda.Event | None = None,
    ) -> tuple[torch.Tensor, Replayed | None]:
        """Launch a step without waiting, and return its logits [R, vocab], which the next launch overwrites.

        Without edits of logits and log-probabilities, sampling is launched too, and its result is returned.
        `table_rows` are those of `tables` for the step. `drawn_ids` int64 [R] are the ids of the step before; for
        `drawn_rows` see `build_batch`. `began` is recorded when the device has the step's inputs.
        """
        chunks = step.chunks
        num_rows = len(chunks)
        size = self._forwards.sizes[bisect_left(self._forwards.sizes, num_rows)]
        if drawn_ids is not None and drawn_ids is not self._token_ids:
            self._forwards.words[: len(drawn_ids)].copy_(drawn_ids)
        is_plain = not any(chunk.sequence.params.logprobs is not None or is_edited(chunk) for chunk in chunks)
        rows = [draw_row(chunk.sequence, chunk.end) for chunk in chunks] if is_plain else []
        is_drawn = not all(row.is_greedy for row in rows)
        self._upload(step, size, table_rows, drawn_rows, rows if is_drawn else [])
        if began is not None:
            began.record()
        self._forwards.replay(size)
        logits, draws = self._forwards.logits[:num_rows], self._draws[size]
        if not is_plain:
            return logits, None
        if not is_drawn:
            draws.take_best()
        elif any(row.cuts(self._vocab_size) for row in rows):
            draws.draw_with_cuts()
        else:
            draws.draw()
        replayed = Replayed(self._forwards.words, num_rows, aligned_size(size))
        self._token_ids = replayed.token_ids
        return logits, replayed

    def _upload(
        self, step: Step, size: int, table_rows: list[int], drawn_rows: Mapping[Sequence, int], rows: list[DrawRow]
    ) -> None:
        """Copy the inputs to the device, in one copy."""
        token_ids, sources, positions, slots = [], [], [], []
        block_size, first_input = self._block_size, self._forwards.first_input
        for row, (sequence, start, *_) in enumerate(step.chunks):
            is_known = start < len(sequence.token_ids)
            token_ids.append(sequence.token_ids[start] if is_known else 0)
            sources.append(first_input + row if is_known else drawn_rows[sequence])
            positions.append(start)
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
        seq_lens = [position + 1 for position in positions]
        columns = (token_ids, sources, positions, slots, seq_lens, table_rows, seeds(rows).tolist())
        words = array("q", _padded(columns, INPUT_PADDING, aligned_size(size)))
        if rows:
            values = _padded(numbers(rows).tolist(), PARAMETER_PADDING, aligned_size(size))
            words.frombytes(array("f", values).tobytes())
        inputs = self._forwards.words[first_input : first_input + len(words)]
        inputs.copy_(pinned(torch.frombuffer(words, dtype=torch.int64), inputs.device), non_blocking=True)

    def _capture(self, size: int, capture: Capture) -> Draws:
        """Capture the draws of `size` rows."""
        inputs, parameters = self._forwards.pad(size)
        words, width = self._forwards.words, aligned_size(size)
        logits, sampler = self._forwards.logits[:size], self._sampler
        drawn = words[:size], words[width : width + size]
        return Draws(
            capture(lambda: sampler.take_best(logits, drawn)),
            capture(lambda: sampler.draw(logits, parameters, inputs[-1], has_cuts=False, out=drawn)),
            capture(lambda: sampler.draw(logits, parameters, inputs[-1], has_cuts=True, out=drawn)),
        )


def _padded(columns: Iterable[Iterable[T]], padding: Iterable[T], width: int) -> list[T]:
    """Return the columns as one list, each padded to `width`."""
    values: list[T] = []
    for number, (column, filler) in enumerate(zip(columns, padding, strict=True), start=1):
        values += column
        values += [filler] * (number * width - len(values))
    return values
