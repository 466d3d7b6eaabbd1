"""Runs decode steps as graphs: a step is launched as two graphs instead of hundreds of kernels.

A step in which every sequence decodes one token is the same work each time, except for its inputs. So it is captured
for some numbers of rows, and replayed with its inputs at the same addresses. If a step has fewer rows than the graph,
the rest is padding: nothing is written for these rows. `graph_capture` decides what is captured and how; `ModelRunner`
runs all other steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from oaiserve.engine.model.batch import ALIGNMENT, Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow, SampledIds, draw_row, numbers, seeds
from oaiserve.engine.model.sampling.logit_edits import is_edited
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.model.transfer import ReadBack, pinned
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step

T = TypeVar("T")
Run = Callable[[], object]
Capture = Callable[[Run], Run]  # runs its argument, and returns a function that launches the same work again

# The inputs of a padded row: its token id, the place to take the id from, position, slot, seq_len, row in the block
# tables, seed of its noise.
INPUT_PADDING = (0, 0, 0, -1, 0, 0, GREEDY.seed)
PARAMETER_PADDING = GREEDY[:-1]  # all but the seed


class GraphSampler(Protocol):
    """The interface of a sampler whose operations can be captured, which is two functions of `triton_sampling`."""

    def take_best(self, logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds: ...

    def draw(
        self,
        logits: torch.Tensor,
        parameters: torch.Tensor,
        seeds: torch.Tensor,
        *,
        has_cuts: bool,
        out: SampledIds | None = None,
    ) -> SampledIds: ...


@dataclass(frozen=True, slots=True)
class Graphs:
    """The graphs for one number of rows: one for the forward, and one for each way to sample.

    With both in one graph, the forward would have to be captured again for each way to sample, and once more for steps
    that edit logits in between. The second launch takes some microseconds of the host, while the device runs the first.
    """

    forward: Run
    take_best: Run
    draw: Run
    draw_with_cuts: Run


class Replayed:
    """The tokens that a replayed step draws, while the device computes them. Other steps have a `Sampling` instead.

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
    """The decode steps that were captured for `sizes` rows, in ascending order. No step has more rows than the last.

    `forward` is the one of an executor whose KV cache has blocks of `block_size` tokens, and whose attention writes
    nothing for padded rows, and reads `tables`. The constructor raises what `capture` raises.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        sampler: GraphSampler,
        capture: Capture,
        spec: ModelSpec,
        tables: BlockTables,
        *,
        sizes: list[int],
        max_model_len: int,
        block_size: int,
    ) -> None:
        self.tables = tables
        self._forward = forward
        self._sampler = sampler
        self._sizes = sizes
        self._block_size = block_size
        self._vocab_size = spec.vocab_size
        self._max_model_len = max_model_len
        self._device = spec.device
        most, device = sizes[-1], spec.device
        # One tensor has what the last step drew, as in `Replayed`, followed by all inputs of rows from the host. So a
        # single look-up can take ids from either part.
        self._first_input = 2 * _aligned(most)
        num_inputs = len(INPUT_PADDING) * _aligned(most)
        num_parameters = len(PARAMETER_PADDING) * _aligned(most)  # two of these fit into one int64
        self._words = torch.zeros(
            self._first_input + num_inputs + num_parameters // 2, dtype=torch.int64, device=device
        )
        # Rows that begin at aligned addresses, see `padded_head`.
        logits = torch.zeros(most, aligned(spec.vocab_size), dtype=spec.dtype, device=device)
        self._logits = logits[:, : spec.vocab_size]
        self._row_numbers = torch.arange(most + 1, device=device)
        self._token_ids: torch.Tensor | None = None  # the ids of the step that was replayed last
        # The largest is captured first: all others fit into the memory that it has allocated.
        self._graphs = {size: self._capture(size, capture) for size in reversed(sizes)}

    def num_replayed(self, step: Step) -> int:
        """Return how many of a step's first chunks can be replayed: all that have one token, or none.

        Each has to draw, and to want no log-probabilities of its prompt.
        """
        number = 0
        for sequence, _, num_tokens, max_draws, _ in step.chunks:
            if num_tokens > 1:
                break
            if not max_draws or sequence.wants_prompt_logprobs:
                return 0
            number += 1
        return number if number <= self._sizes[-1] else 0

    def launch(
        self,
        step: Step,
        table_rows: list[int],
        drawn_ids: torch.Tensor | None,
        drawn_rows: Mapping[Sequence, int],
        began: torch.cuda.Event | None = None,
    ) -> tuple[torch.Tensor, Replayed | None]:
        """Launch a step without waiting, and return its logits [R, vocab], which the next launch overwrites.

        If no logits are edited and no log-probabilities are asked for, sampling is launched too, and its result is
        returned. `table_rows` are those that `tables` has for the step. `drawn_ids` int64 [R] are the ids of the step
        before; for `drawn_rows` see `build_batch`. `began` is recorded when the device has the step's inputs.
        """
        chunks = step.chunks
        num_rows = len(chunks)
        size = self._sizes[bisect_left(self._sizes, num_rows)]
        graphs = self._graphs[size]
        if drawn_ids is not None and drawn_ids is not self._token_ids:
            self._words[: len(drawn_ids)].copy_(drawn_ids)
        is_plain = not any(chunk.sequence.params.logprobs is not None or is_edited(chunk) for chunk in chunks)
        rows = [draw_row(chunk.sequence, chunk.end) for chunk in chunks] if is_plain else []
        is_drawn = not all(row.is_greedy for row in rows)
        self._upload(step, size, table_rows, drawn_rows, rows if is_drawn else [])
        if began is not None:
            began.record()
        graphs.forward()
        logits = self._logits[:num_rows]
        if not is_plain:
            return logits, None
        if not is_drawn:
            graphs.take_best()
        elif any(row.cuts(self._vocab_size) for row in rows):
            graphs.draw_with_cuts()
        else:
            graphs.draw()
        replayed = Replayed(self._words, num_rows, _aligned(size))
        self._token_ids = replayed.token_ids
        return logits, replayed

    def _upload(
        self, step: Step, size: int, table_rows: list[int], drawn_rows: Mapping[Sequence, int], rows: list[DrawRow]
    ) -> None:
        """Copy the inputs to the device, in one copy."""
        token_ids, sources, positions, slots = [], [], [], []
        block_size = self._block_size
        for row, (sequence, start, *_) in enumerate(step.chunks):
            is_known = start < len(sequence.token_ids)
            token_ids.append(sequence.token_ids[start] if is_known else 0)
            sources.append(self._first_input + row if is_known else drawn_rows[sequence])
            positions.append(start)
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
        seq_lens = [position + 1 for position in positions]
        columns = (token_ids, sources, positions, slots, seq_lens, table_rows, seeds(rows).tolist())
        words = array("q", _padded(columns, INPUT_PADDING, _aligned(size)))
        if rows:
            values = _padded(numbers(rows).tolist(), PARAMETER_PADDING, _aligned(size))
            words.frombytes(array("f", values).tobytes())
        inputs = self._words[self._first_input : self._first_input + len(words)]
        inputs.copy_(pinned(torch.frombuffer(words, dtype=torch.int64), self._device), non_blocking=True)

    def _capture(self, size: int, capture: Capture) -> Graphs:
        """Capture the graphs for `size` rows."""
        width = _aligned(size)
        num_inputs, num_parameters = len(INPUT_PADDING) * width, len(PARAMETER_PADDING) * width
        words = self._words[self._first_input :]
        inputs = words[:num_inputs].view(-1, width)[:, :size]
        in_parameters = words[num_inputs : num_inputs + num_parameters // 2]
        parameters = in_parameters.view(torch.float32).view(-1, width)[:, :size]
        inputs.copy_(torch.tensor(INPUT_PADDING)[:, None])  # `capture` runs what it captures: all rows are padding
        parameters.copy_(torch.tensor(PARAMETER_PADDING)[:, None])
        logits, sampler = self._logits[:size], self._sampler
        drawn = self._words[:size], self._words[width : width + size]

        def forward() -> None:
            logits.copy_(self._forward(self._batch(inputs)))

        return Graphs(
            capture(forward),
            capture(lambda: sampler.take_best(logits, drawn)),
            capture(lambda: sampler.draw(logits, parameters, inputs[-1], has_cuts=False, out=drawn)),
            capture(lambda: sampler.draw(logits, parameters, inputs[-1], has_cuts=True, out=drawn)),
        )

    def _batch(self, inputs: torch.Tensor) -> Batch:
        """Return the batch that reads `inputs` int64 [7, R] and the block tables in place.

        Its lengths on the host are the longest that there can be.
        """
        _, sources, positions, slots, seq_lens, table_rows, _ = inputs
        num_rows, none = len(sources), self._row_numbers[:0]
        return Batch(
            input_ids=self._words.index_select(0, sources),
            positions=positions,
            slots=slots,
            block_tables=self.tables.on_device,
            table_rows=table_rows,
            query_start=self._row_numbers[: num_rows + 1],
            seq_lens=seq_lens,
            logits_rows=self._row_numbers[:num_rows],
            unknown_rows=none,
            drawn_rows=none,
            num_decodes=num_rows,
            query_lens=[1] * num_rows,
            context_lens=[self._max_model_len] * num_rows,
            sample_chunks=[],
            prompt_rows=[],
        )


def _aligned(size: int) -> int:
    """Return the size rounded up so that each row of inputs begins at an aligned address."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _padded(columns: Iterable[Iterable[T]], padding: Iterable[T], width: int) -> list[T]:
    """Return the columns as one list, each padded to `width`."""
    values: list[T] = []
    for number, (column, filler) in enumerate(zip(columns, padding, strict=True), start=1):
        values += column
        values += [filler] * (number * width - len(values))
    return values
