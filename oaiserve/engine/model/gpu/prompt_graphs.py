"""Runs prompts as graphs: the forward of all prompts of a step is one launch instead of hundreds.

A small model computes some hundred tokens sooner than the host launches the operations of all its layers. So a forward
is captured for some numbers of tokens, and replayed for as many or fewer, of prompts of any lengths; the padding is not
written into the cache. Larger steps are launched operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.attention.tiles import StaticTiles
from oaiserve.engine.model.batch import Batch, aligned_size, build_batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.cuda_capture import Capture, Run
from oaiserve.engine.model.gpu.sized_graphs import SizedGraphs
from oaiserve.engine.model.padded_head import aligned
from oaiserve.engine.model.transfer import pinned
from oaiserve.engine.step import Step

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters

MOST_PROMPTS = 64  # in a step that is replayed, and rows of logits that it computes
_PADDING = (0, 0, -1)  # of a token: its id, position and slot
_HOST = torch.device("cpu")


class PromptGraphs:
    """The captured forwards, for `sizes` tokens in ascending order.

    `forward` is the one of an executor whose attention asks `Batch.tiles` for its work, and reads `tables`. Those of
    `first` are captured by the constructor, which raises the errors of `capture`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        capture: Capture,
        spec: ModelSpec,
        tables: BlockTables,
        *,
        sizes: list[int],
        first: Collection[int] | None = None,  # None: all
        block_size: int,
        adapters: TritonAdapters | None = None,
    ) -> None:
        self._forward = forward
        self._capture = capture
        self._tables = tables
        self._block_size = block_size
        self._device = spec.device
        self.sizes = sizes
        self.long_prompts: LongPrompts | None = None  # which are not replayed
        self.most_len = tables.on_device.shape[1] * block_size
        num_words = len(_PADDING) * aligned_size(sizes[-1]) + 4 * aligned_size(MOST_PROMPTS + 1)
        self._words = torch.zeros(num_words, dtype=torch.int64, device=spec.device)
        logits = torch.zeros(MOST_PROMPTS, aligned(spec.vocab_size), dtype=spec.dtype, device=spec.device)
        self.logits = logits[:, : spec.vocab_size]
        self._tiles = {size: StaticTiles(size, MOST_PROMPTS, spec.device) for size in sizes}
        self._adapters = adapters
        self.graphs = SizedGraphs(sizes, sizes if first is None else first, self._captured, adapters)

    def can_run(self, step: Step, adapters: Sequence[Adapter | None] = ()) -> bool:
        """Return whether the step has no unknown token, not too many, no log-probabilities of prompts, no media, and
        not long prompts alone.

        There must be a graph for `adapters`, those of all chunks; empty if none has one.
        """
        num_tokens = step.num_tokens
        return (
            sum(1 + len(chunk.draft) for chunk in step.chunks) <= MOST_PROMPTS
            and not (self.long_prompts and self.long_prompts.take((one.num_tokens, one.end) for one in step.chunks))
            and all(
                chunk.end - len(chunk.draft) <= len(chunk.sequence.token_ids)
                and not chunk.sequence.wants_prompt_logprobs
                and (chunk.sequence.media is None or chunk.start >= chunk.sequence.prompt_len)
                for chunk in step.chunks
            )
            and self.graphs.find(lambda size: size >= num_tokens, adapters) is not None
        )

    def launch(
        self,
        step: Step,
        table_rows: list[int],
        began: torch.cuda.Event | None = None,
        adapters: Sequence[Adapter | None] = (),
    ) -> tuple[torch.Tensor, list[int]]:
        """Launch a step without waiting. Return its logits [R, vocab], which the next launch overwrites, and the chunk
        of each row.

        `table_rows` are those of `tables` for the step. `began` is recorded when the device has its inputs.
        """
        num_tokens = step.num_tokens
        found = self.graphs.find(lambda size: size >= num_tokens, adapters)
        assert found is not None
        size, forward = found
        if self._adapters is not None and any(adapters):
            self._adapters.upload(adapters, [chunk.num_tokens for chunk in step.chunks], size)
        sample_chunks = self.upload(step, table_rows, size, self._tiles[size])
        if began is not None:
            began.record()
        forward()
        return self.logits[: len(sample_chunks)], sample_chunks

    def upload(self, step: Step, table_rows: list[int], size: int, tiles: StaticTiles) -> list[int]:
        """Copy the inputs of `size` tokens to the device, and return the chunk of each draw."""
        packed = build_batch(step, self._block_size, _HOST, tables=(self._tables.on_device, table_rows))
        ends = packed.query_start[-1:].expand(
            MOST_PROMPTS + 1 - len(packed.query_start)
        )  # of prompts that are not there
        of_tokens = zip((packed.input_ids, packed.positions, packed.slots), _PADDING, strict=True)
        of_prompts = (packed.table_rows, torch.cat([packed.query_start, ends]), packed.seq_lens, packed.logits_rows)
        words = torch.cat(
            [
                *(_padded(column, aligned_size(size), filler) for column, filler in of_tokens),
                *(_padded(column, aligned_size(MOST_PROMPTS + 1)) for column in of_prompts),
            ]
        )
        self._words[: len(words)].copy_(pinned(words, self._device), non_blocking=True)
        tiles.update(packed.query_lens, packed.context_lens)
        return packed.sample_chunks

    def padding(self, size: int, adapters: TritonAdapters | None = None) -> Batch:
        """Make all inputs padding, and return the batch of `size` tokens that reads them in place."""
        num_words = len(_PADDING) * aligned_size(size)
        tokens = self._words[:num_words].view(len(_PADDING), -1)[:, :size]
        others = self._words[num_words:][: 4 * aligned_size(MOST_PROMPTS + 1)].view(4, -1)
        self._words.zero_()
        tokens.copy_(torch.tensor(_PADDING)[:, None])
        table_rows, query_start, seq_lens, logits_rows = others
        return Batch(
            input_ids=tokens[0],
            positions=tokens[1],
            slots=tokens[2],
            block_tables=self._tables.on_device,
            table_rows=table_rows[:MOST_PROMPTS],
            query_start=query_start[: MOST_PROMPTS + 1],
            seq_lens=seq_lens[:MOST_PROMPTS],
            logits_rows=logits_rows[:MOST_PROMPTS],
            num_decodes=0,
            # Lengths on the host only decide which kernels are used: those for the longest prompt that there can be.
            query_lens=[size],
            context_lens=[self.most_len],
            tiles=self._tiles[size],
            captured_adapters=None if adapters is None else adapters.captured(size),
        )

    def _captured(self, size: int, adapters: TritonAdapters | None) -> Run:
        batch = self.padding(size, adapters)  # `capture` runs the work first

        def forward() -> None:
            self.logits.copy_(self._forward(batch))

        return self._capture(forward)


def _padded(column: torch.Tensor, width: int, filler: int = 0) -> torch.Tensor:
    return torch.nn.functional.pad(column, (0, width - len(column)), value=filler)
