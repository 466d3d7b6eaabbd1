"""Runs decode steps as graphs: a step is launched as two graphs instead of hundreds of kernels.

A step in which every sequence decodes one token is the same work each time. So its forward is captured for some numbers
of rows, and replayed with other inputs, at fixed addresses; the draws are captured by themselves. Padding makes up for
missing rows, and writes nothing. `graph_capture` decides on captures; `ModelRunner` runs all other steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Sequenced
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import torch

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, aligned_size
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture, Run
from oaiserve.engine.model.gpu.sized_graphs import SizedGraphs
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.sampling.draw_rows import GREEDY, DrawRow, draw_row, numbers, seeds
from oaiserve.engine.model.sampling.logit_edits import is_edited
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.model.states import States
from oaiserve.engine.model.transfer import ReadBack, pinned
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

T = TypeVar("T")

# The inputs of a padded row: its token id, the place to take the id from, position, slot, seq_len, row in the block
# tables, seed of its noise; and the place of its state, where layers have one.
INPUT_PADDING = (0, 0, 0, -1, 0, 0, GREEDY.seed)
SEED = len(INPUT_PADDING) - 1
PARAMETER_PADDING = GREEDY[:-1]  # all but the seed


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
    """The decode steps that can be replayed, and their draws, for `sizes` rows in ascending order.

    `forward` is the one of an executor whose attention writes nothing for padded rows, and reads `tables`. `sampler` is
    the module `triton_sampling`, whose draws can be captured. The KV cache has blocks of `block_size` tokens. Those of
    `first` are captured by the constructor, which raises the errors of `capture`. The last of `states` is for padding.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        sampler: ModuleType,
        capture: Capture,
        spec: ModelSpec,
        tables: BlockTables,
        *,
        sizes: list[int],
        first: Collection[int] | None = None,  # None: all
        block_size: int,
        max_model_len: int,
        states: States | None = None,
        adapters: TritonAdapters | None = None,
    ) -> None:
        self.tables = tables
        self._forward = forward
        self._capture = capture
        self._sampler = sampler
        self.sizes = sizes
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._states = states
        self._input_padding = INPUT_PADDING if states is None else (*INPUT_PADDING, states.last)
        most, device = sizes[-1], spec.device
        # One tensor has the draws of the last step, ids and whether logits were finite, followed by all inputs of rows
        # from the host. So a single look-up can take ids from either part.
        self._first_input = 2 * aligned_size(most)
        num_inputs = len(self._input_padding) * aligned_size(most)
        num_parameters = len(PARAMETER_PADDING) * aligned_size(most)  # two of these fit into one int64
        num_words = self._first_input + num_inputs + num_parameters // 2
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        # Rows that begin at aligned addresses, see `padded_head`.
        logits = torch.zeros(most, aligned(spec.vocab_size), dtype=spec.dtype, device=device)
        self.logits = logits[:, : spec.vocab_size]
        self._row_numbers = torch.arange(most + 1, device=device)
        self._token_ids: torch.Tensor | None = None  # the ids of the step that was replayed last
        self._draws: dict[int, Draws] = {}
        self._adapters = adapters
        self.graphs = SizedGraphs(sizes, sizes if first is None else first, self._captured, adapters)

    def num_replayed(self, step: Step, adapters: Sequenced[Adapter | None] = ()) -> int:
        """Return the number of a step's decodes, its first chunks, or 0 if one of them cannot be replayed.

        `adapters` are those of all chunks; empty if none has one.
        """
        number = 0
        for sequence, start, num_tokens, max_draws, _, _ in step.chunks:
            if num_tokens > 1:
                break
            has_vectors = sequence.media is not None and start < sequence.prompt_len
            if not max_draws or sequence.wants_prompt_logprobs or has_vectors:
                return 0
            number += 1
        return number if number and self.graphs.find(lambda size: size >= number, adapters[:number]) else 0

    def launch(
        self,
        step: Step,
        table_rows: list[int],
        drawn_ids: torch.Tensor | None,
        drawn_rows: Mapping[Sequence, int],
        began: torch.cuda.Event | None = None,
        mixed: tuple[int, Run] | None = None,
        adapters: Sequenced[Adapter | None] = (),
    ) -> tuple[torch.Tensor, Replayed | None]:
        """Launch a step without waiting, and return its logits [R, vocab], which the next launch overwrites.

        Without edits of logits and log-probabilities, sampling is launched too, and its result is returned.
        `table_rows` are those of `tables` for the step. `drawn_ids` int64 [R] are the ids of the step before; for
        `drawn_rows` see `build_batch`. `began` is recorded when the device has the step's inputs. `mixed` is a forward
        of so many rows that computes prompts, too, whose adapters have been uploaded.
        """
        chunks = step.chunks
        num_rows = len(chunks)
        found = mixed or self.graphs.find(lambda size: size >= num_rows, adapters)
        assert found is not None
        size, forward = found
        if self._adapters is not None and mixed is None and any(adapters):
            self._adapters.upload(adapters, [1] * num_rows, size)
        if drawn_ids is not None and drawn_ids is not self._token_ids:
            self._words[: len(drawn_ids)].copy_(drawn_ids)
        is_plain = not any(chunk.sequence.params.logprobs is not None or is_edited(chunk) for chunk in chunks)
        rows = [draw_row(chunk.sequence, chunk.end) for chunk in chunks] if is_plain else []
        is_drawn = not all(row.is_greedy for row in rows)
        self._upload(step, size, table_rows, drawn_rows, rows if is_drawn else [])
        if began is not None:
            began.record()
        forward()
        logits, draws = self.logits[:num_rows], self._draws[size]
        if not is_plain:
            return logits, None
        if not is_drawn:
            draws.take_best()
        elif any(row.cuts(logits.shape[1]) for row in rows):
            draws.draw_with_cuts()
        else:
            draws.draw()
        replayed = Replayed(self._words, num_rows, aligned_size(size))
        self._token_ids = replayed.token_ids
        return logits, replayed

    def _upload(
        self, step: Step, size: int, table_rows: list[int], drawn_rows: Mapping[Sequence, int], rows: list[DrawRow]
    ) -> None:
        """Copy the inputs to the device, in one copy."""
        token_ids, sources, positions, slots = [], [], [], []
        block_size, first_input = self._block_size, self._first_input
        for row, (sequence, start, *_) in enumerate(step.chunks):
            is_known = start < len(sequence.token_ids)
            token_ids.append(sequence.token_ids[start] if is_known else 0)
            sources.append(first_input + row if is_known else drawn_rows[sequence])
            positions.append(start if sequence.media is None else sequence.media.position(start))
            slots.append(sequence.blocks[start // block_size] * block_size + start % block_size)
        seq_lens = [chunk.end for chunk in step.chunks]
        columns = [token_ids, sources, positions, slots, seq_lens, table_rows, seeds(rows).tolist()]
        if self._states is not None:
            columns.append([_place(chunk.sequence) for chunk in step.chunks])
            self._states.begin([_place(chunk.sequence) for chunk in step.chunks if chunk.start == 0])
        words = array("q", _padded(columns, self._input_padding, aligned_size(size)))
        if rows:
            values = _padded(numbers(rows).tolist(), PARAMETER_PADDING, aligned_size(size))
            words.frombytes(array("f", values).tobytes())
        inputs = self._words[first_input : first_input + len(words)]
        inputs.copy_(pinned(torch.frombuffer(words, dtype=torch.int64), inputs.device), non_blocking=True)

    def _pad(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make all rows padding, and return inputs int64 [7 or 8, size] and parameters float32 [4, size]."""
        width = aligned_size(size)
        num_inputs, num_parameters = len(self._input_padding) * width, len(PARAMETER_PADDING) * width
        words = self._words[self._first_input :]
        inputs = words[:num_inputs].view(-1, width)[:, :size]
        in_parameters = words[num_inputs : num_inputs + num_parameters // 2]
        parameters = in_parameters.view(torch.float32).view(-1, width)[:, :size]
        inputs.copy_(torch.tensor(self._input_padding)[:, None])
        parameters.copy_(torch.tensor(PARAMETER_PADDING)[:, None])
        return inputs, parameters

    def padding(self, size: int, adapters: TritonAdapters | None = None) -> Callable[[], Batch]:
        """Make all inputs padding, and return what makes the batch of `size` rows that reads them in place.

        It looks the token ids up. Lengths on the host are the longest.
        """
        captured_adapters = None if adapters is None else adapters.captured(size)
        _, sources, positions, slots, seq_lens, table_rows, _, *places = self._pad(size)[0]
        states = None if self._states is None else self._states.of_rows(*places)

        def batch() -> Batch:
            return Batch(
                input_ids=self._words.index_select(0, sources),
                positions=positions,
                slots=slots,
                block_tables=self.tables.on_device,
                table_rows=table_rows,
                query_start=self._row_numbers[: size + 1],
                seq_lens=seq_lens,
                logits_rows=self._row_numbers[:size],
                num_decodes=size,
                query_lens=[1] * size,
                context_lens=[self._max_model_len] * size,
                states=states,
                captured_adapters=captured_adapters,
            )

        return batch

    def _captured(self, size: int, adapters: TritonAdapters | None) -> Run:
        """Return the captured forward of `size` rows, whose draws are captured, too."""
        make_batch = self.padding(size, adapters)

        def forward() -> None:
            self.logits[:size].copy_(self._forward(make_batch()))

        captured = self._capture(forward)
        self.capture_draws(size)
        return captured

    def capture_draws(self, size: int) -> None:
        """Capture the draws of `size` rows, unless they are."""
        if size in self._draws:
            return
        inputs, parameters = self._pad(size)
        logits, sampler, width = self.logits[:size], self._sampler, aligned_size(size)
        drawn = self._words[:size], self._words[width : width + size]
        last_drawn = self._words[: self._first_input].clone()  # which the next step may need
        self._draws[size] = Draws(
            self._capture(lambda: sampler.take_best(logits, drawn)),
            self._capture(lambda: sampler.draw(logits, parameters, inputs[SEED], has_cuts=False, out=drawn)),
            self._capture(lambda: sampler.draw(logits, parameters, inputs[SEED], has_cuts=True, out=drawn)),
        )
        self._words[: self._first_input].copy_(last_drawn)


def _place(sequence: Sequence) -> int:
    return sequence.state or 0  # the sequences of rehearsals have no state of their own: any one will do


def _padded(columns: Iterable[Iterable[T]], padding: Iterable[T], width: int) -> list[T]:
    """Return the columns as one list, each padded to `width`."""
    values: list[T] = []
    for number, (column, filler) in enumerate(zip(columns, padding, strict=True), start=1):
        values += column
        values += [filler] * (number * width - len(values))
    return values
