"""Runs steps as CUDA graphs. One launch covers a step's forward pass and draws, instead of hundreds of kernels.

A step is captured for a number of tokens and a number of decodes among them, with inputs at fixed addresses, and
replayed for steps of at most these numbers. Kernels read on the device which tokens are decodes. Padding fills the rest
and writes nothing. All graphs are captured at the start. Steps without a graph are launched operation by operation.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Sequenced
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import Batch, aligned_size
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.sampling.logit_edits import is_edited
from oaiserve.engine.model.sampling.sampled_ids import DeviceEdits
from oaiserve.engine.model.sampling.sampler import Sampled
from oaiserve.engine.model.states import States
from oaiserve.engine.model.transfer import ReadBack
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk, Draw, Step
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.cuda_capture import Capture, Run
from oaiserve.plugins.cuda.executor.step_inputs import StepInputs
from oaiserve.plugins.cuda.executor.step_sizes import MOST_PROMPTS, Size
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts

_AT_LAUNCH = Draw.AT_LAUNCH  # Members of enumerations are slow to read in Python 3.11.

if TYPE_CHECKING:  # The import needs Triton.
    from oaiserve.plugins.cuda.executor.triton_adapters import TritonAdapters


class Replayed:
    """The drawn tokens of a replayed step, while the device computes them. Other steps have a `Sampling` instead.

    `drawn` is int64. It begins with the ids of the step's rows. From `first_finite` on, it states whether their logits
    were finite.
    """

    def __init__(self, drawn: torch.Tensor, num_rows: int, first_finite: int) -> None:
        self.token_ids = drawn[:num_rows]  # on the device; the next replayed step overwrites them
        self._num_rows = num_rows
        self._first_finite = first_finite
        results = drawn[: first_finite + num_rows]
        # On a CPU, nothing is copied to the host, so the next step would overwrite the results.
        self.read_back = ReadBack([results.clone() if results.device.type == "cpu" else results])

    def wait(self) -> Sampled:
        """Return the results once they are on the host."""
        (results,) = self.read_back.wait()
        are_finite = results[self._first_finite :] != 0
        return Sampled(results[: self._num_rows].tolist(), are_finite.tolist(), [None] * self._num_rows, [])


class StepGraphs:
    """The steps that can be replayed, for `sizes` in ascending order.

    `forward` belongs to an executor whose attention writes nothing for padded rows, and reads lengths and `tables` on
    the device. `sampler` is the module `triton_sampling`, whose draws can be captured. The KV cache has blocks of
    `block_size` tokens. Padding uses the last of `states`. With `adapters`, each size is captured twice. With `counts`,
    draws apply penalties. The constructor raises the errors of `capture`.
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
        sizes: list[Size],
        block_size: int,
        states: States | None = None,
        adapters: TritonAdapters | None = None,
        counts: DeviceCounts | None = None,
    ) -> None:
        self.tables = tables
        self.sizes = sizes
        self._totals = [size.num_tokens for size in sizes]
        self._states = states
        self._adapters = adapters
        self._counts = counts
        most_rows = max(size.num_sequences for size in sizes)
        # One tensor holds the ids of the last step's draws, whether their logits were finite, and then all inputs from
        # the host. So a single look-up can read ids from either part.
        first = 2 * aligned_size(most_rows)
        self._inputs = {size: StepInputs(size, first, block_size, states) for size in sizes}
        num_words = max(inputs.end for inputs in self._inputs.values())
        self._words = torch.zeros(num_words, dtype=torch.int64, device=spec.device)
        # Its rows begin at aligned addresses, see `padded_head`.
        logits = torch.zeros(most_rows, aligned(spec.vocab_size), dtype=spec.dtype, device=spec.device)
        self.logits = logits[:, : spec.vocab_size]
        self._token_ids: torch.Tensor | None = None  # the ids of the step that was replayed last
        self._graphs: dict[tuple[Size, bool], Run] = {}  # keyed by size, and by whether the step has adapters
        # The largest size is captured first, because all others fit into the memory that it allocates.
        for size in reversed(sizes):
            for additions in [None, adapters] if adapters is not None else [None]:
                self._graphs[size, additions is not None] = capture(self._run(size, forward, sampler, additions))

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def find(self, step: Step, adapters: Sequenced[Adapter | None] = ()) -> Size | None:
        """Return the smallest size for a step, or None if it cannot be replayed.

        `adapters` has the adapter of each chunk; it is empty if no chunk has one.
        """
        num_rows = 0
        num_tokens = 0
        num_draws = 0  # draws of chunks with several tokens
        for sequence, start, count, max_draws, draft, _ in step.chunks:
            if sequence.wants_prompt_logprobs or (sequence.media is not None and start < sequence.prompt_len):
                return None
            if count == 1:
                num_rows += 1
            else:
                num_tokens += count
                num_draws += 1 + len(draft) if max_draws else 0
        if len(step.chunks) - num_rows > MOST_PROMPTS:
            return None
        smallest = bisect_left(self._totals, num_rows + num_tokens)
        needed = num_rows, num_tokens, num_draws
        found = next((one for one in self.sizes[smallest:] if _has_room(one, *needed)), None)
        if found is not None and any(adapters) and (self._adapters is None or not self._adapters.admit(adapters)):
            return None
        return found

    def launch(
        self,
        size: Size,
        step: Step,
        draws: list[Chunk],
        table_rows: list[int],
        drawn_ids: torch.Tensor | None,
        drawn_rows: Mapping[Sequence, int],
        began: torch.cuda.Event | None = None,
        adapters: Sequenced[Adapter | None] = (),
    ) -> tuple[torch.Tensor, Replayed | None]:
        """Launch a step without waiting, as `Replays` says. `table_rows` are the step's rows of `tables`."""
        has_adapters = any(adapters)
        if drawn_ids is not None and drawn_ids is not self._token_ids:
            self._words[: len(drawn_ids)].copy_(drawn_ids)
        is_plain = _are_plain(draws)
        sampled = draws if is_plain and not all(draw[0].is_greedy for draw in draws) else []
        numbers = self._adapters.numbers(adapters) if self._adapters is not None and has_adapters else []
        count_rows: list[int] = []
        if is_plain and self._counts is not None and any(draw[0].is_counted for draw in draws):
            count_rows = self._counts.rows_of(draws)
        self._inputs[size].upload(self._words, step, table_rows, drawn_rows, sampled, count_rows, numbers)
        if self._states is not None:
            self._states.begin([chunk.sequence.state or 0 for chunk in step.chunks if chunk.start == 0])
        if began is not None:
            began.record()
        self._graphs[size, has_adapters]()
        logits = self.logits[: len(draws)]
        if not is_plain:
            self._token_ids = None  # draws with padding parameters have overwritten them
            return logits, None
        replayed = Replayed(self._words, len(draws), aligned_size(size.num_sequences))
        self._token_ids = replayed.token_ids
        return logits, replayed

    def _run(
        self,
        size: Size,
        forward: Callable[[Batch], torch.Tensor],
        sampler: ModuleType,
        adapters: TritonAdapters | None,
    ) -> Run:
        """Fill all inputs with padding, and return a function that computes a step and reads them in place.

        Lengths on the host only select kernels, here those for one prompt with all tokens and any context.
        """
        number = size.num_sequences
        inputs = self._inputs[size]
        inputs.upload(self._words, Step(), [], {}, [], [], [])
        views = inputs.views(self._words)
        logits = self.logits[:number]
        width = aligned_size(number)
        drawn = self._words[:number], self._words[width : width + number]
        prompts = [size.tokens, *[0] * (size.num_prompts - 1)] if size.tokens else []
        edits: DeviceEdits | None = None
        if self._counts is not None:
            edits = DeviceEdits(self._counts.penalties(views.count_rows))

        def run() -> None:
            batch = Batch(
                input_ids=self._words.index_select(0, views.sources),
                positions=views.positions,
                slots=views.slots,
                block_tables=self.tables.on_device,
                table_rows=views.table_rows,
                query_start=views.query_start,
                seq_lens=views.seq_lens,
                logits_rows=views.logits_rows,
                num_decodes=size.rows,
                query_lens=[1] * size.rows + prompts,
                context_lens=[self.tables.most_tokens] * number,
                states=None if self._states is None else self._states.of_rows(views.places),
                captured_adapters=None if adapters is None else adapters.captured(views.adapters),
                decode_slots=views.decode_slots if size.tokens else None,
            )
            logits.copy_(forward(batch))
            sampler.draw(logits, views.parameters, views.seeds, drawn, edits)

        return run


def _has_room(size: Size, num_rows: int, num_others: int, num_draws: int) -> bool:
    """Return whether a size with enough tokens has room for a step's decodes, its other tokens, and their draws."""
    if (size.tokens > 0) != (num_others > 0) or size.rows < num_rows:
        return False
    return size.num_sequences >= num_rows + num_draws


def _are_plain(draws: list[Chunk]) -> bool:
    """Return whether there are draws, and each depends only on the logits, parameters and counts of its row."""
    for draw in draws:
        sequence, _, _, _, draft, moment = draw  # A starred target would collect the others in a list.
        params = sequence.params
        if moment is not _AT_LAUNCH or sequence.has_edits or params.logprobs is not None:
            return False
        if draft and sequence.is_counted:
            return False
        if params.min_tokens and is_edited(draw):
            return False
    return bool(draws)
