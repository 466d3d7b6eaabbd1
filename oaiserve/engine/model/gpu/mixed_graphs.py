"""Runs decodes and prompts of a step as one graph, which reads the weights once.

The forward of decodes beside prompts is captured for a few numbers of rows and of tokens. It reads the inputs of both
kinds of graphs in place, and leaves the logits where these do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

import torch

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.attention.tiles import StaticTiles
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.cuda_capture import Capture, Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.prompt_graphs import MOST_PROMPTS, PromptGraphs
from oaiserve.engine.model.gpu.sized_graphs import SizedGraphs
from oaiserve.engine.step import Step

if TYPE_CHECKING:  # which needs Triton
    from oaiserve.engine.model.gpu.triton_adapters import TritonAdapters


class MixedGraphs:
    """The captured forwards, for `sizes`: pairs of numbers of decodes and of tokens of prompts.

    The numbers are some of those of `decodes` and `prompts`. Those of `first` are captured by the constructor, which
    raises the errors of `capture`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        capture: Capture,
        decodes: DecodeGraphs,
        prompts: PromptGraphs,
        *,
        sizes: Iterable[tuple[int, int]],
        first: Collection[tuple[int, int]] | None = None,  # None: all
        adapters: TritonAdapters | None = None,
    ) -> None:
        self._forward, self._decodes, self._prompts = forward, decodes, prompts
        self._capture = capture
        self._tiles: dict[tuple[int, int], StaticTiles] = {}
        self.sizes = sorted(sizes, key=sum)
        self._adapters = adapters
        self.graphs = SizedGraphs(self.sizes, self.sizes if first is None else first, self._captured, adapters)

    def upload(
        self, num_decodes: int, prompts: Step, table_rows: list[int], adapters: list[Adapter | None] | None = None
    ) -> tuple[int, Run, list[int]] | None:
        """Copy the inputs of prompts that `PromptGraphs` can run to the device. Return the number of rows of decodes
        that the forward has, the forward, and the chunk of each row of the prompts' logits.

        Return None for a step that is too large for one graph. `table_rows` are those of the prompts, `adapters` those
        of decodes and prompts.
        """
        adapters = adapters or []
        num_tokens = prompts.num_tokens
        found = self.graphs.find(lambda size: size[0] >= num_decodes and size[1] >= num_tokens, adapters)
        if found is None:
            return None
        (rows, tokens), forward = found
        sample_chunks = self._prompts.upload(prompts, table_rows, tokens, self._tiles[rows, tokens])
        if self._adapters is not None and any(adapters):
            padding: list[Adapter | None] = [None] * (rows - num_decodes)
            lengths = [1] * rows + [chunk.num_tokens for chunk in prompts.chunks]
            self._adapters.upload([*adapters[:num_decodes], *padding, *adapters[num_decodes:]], lengths, rows + tokens)
        return rows, forward, sample_chunks

    def _captured(self, size: tuple[int, int], adapters: TritonAdapters | None) -> Run:
        rows, tokens = size
        make_decodes, prompts = self._decodes.padding(rows), self._prompts.padding(tokens)
        tiles = self._tiles.get(size) or StaticTiles(tokens, MOST_PROMPTS, prompts.slots.device, num_decodes=rows)
        self._tiles[size] = tiles
        captured_adapters = None if adapters is None else adapters.captured(rows + tokens)

        def forward() -> None:
            batch = _together(make_decodes(), prompts, tiles)
            batch.captured_adapters = captured_adapters
            logits = self._forward(batch)
            self._decodes.logits[:rows].copy_(logits[:rows])
            self._prompts.logits.copy_(logits[rows:])

        captured = self._capture(forward)
        self._decodes.capture_draws(rows)
        return captured


def _together(decodes: Batch, prompts: Batch, tiles: StaticTiles) -> Batch:
    """Return the batch of both, the decodes first."""
    rows = decodes.num_decodes

    def joined(name: str) -> torch.Tensor:
        return torch.cat([getattr(decodes, name), getattr(prompts, name)])

    return Batch(
        input_ids=joined("input_ids"),
        positions=joined("positions"),
        slots=joined("slots"),
        block_tables=decodes.block_tables,
        table_rows=joined("table_rows"),
        query_start=torch.cat([decodes.query_start[:-1], prompts.query_start + rows]),
        seq_lens=joined("seq_lens"),
        logits_rows=torch.cat([decodes.logits_rows, prompts.logits_rows + rows]),
        num_decodes=rows,
        query_lens=decodes.query_lens + prompts.query_lens,
        context_lens=decodes.context_lens + prompts.context_lens,
        tiles=tiles,
    )
