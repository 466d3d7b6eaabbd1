"""Runs decodes and prompts of a step as one graph, which reads the weights once.

The forward of decodes beside prompts is captured for a few numbers of rows and of tokens. It reads the inputs of both
kinds of graphs in place, and leaves the logits where these do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from oaiserve.engine.model.attention.tiles import StaticTiles
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.cuda_capture import Capture, Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.prompt_graphs import MOST_PROMPTS, PromptGraphs
from oaiserve.engine.step import Step


class MixedGraphs:
    """The captured forwards, for `row_sizes` decodes and `token_sizes` tokens of prompts, both ascending.

    The sizes are some of those of `decodes` and `prompts`. The constructor raises the errors of `capture`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        forward: Callable[[Batch], torch.Tensor],
        capture: Capture,
        decodes: DecodeGraphs,
        prompts: PromptGraphs,
        *,
        row_sizes: list[int],
        token_sizes: list[int],
    ) -> None:
        self._forward, self._decodes, self._prompts = forward, decodes, prompts
        self._row_sizes, self.token_sizes = row_sizes, token_sizes
        self._tiles: dict[tuple[int, int], StaticTiles] = {}
        self._graphs: dict[tuple[int, int], Run] = {}
        for rows in reversed(row_sizes):  # the largest is captured first, see `PromptGraphs`
            for tokens in reversed(token_sizes):
                self._graphs[rows, tokens] = self._capture(rows, tokens, capture)

    def upload(self, num_decodes: int, prompts: Step, table_rows: list[int]) -> tuple[int, Run, list[int]] | None:
        """Copy the inputs of prompts that `PromptGraphs` can run to the device. Return the number of rows of decodes
        that the forward has, the forward, and the chunk of each row of the prompts' logits.

        Return None for a step that is too large for one graph. `table_rows` are those of the prompts.
        """
        if num_decodes > self._row_sizes[-1] or prompts.num_tokens > self.token_sizes[-1]:
            return None
        rows = self._row_sizes[bisect_left(self._row_sizes, num_decodes)]
        tokens = self.token_sizes[bisect_left(self.token_sizes, prompts.num_tokens)]
        sample_chunks = self._prompts.upload(prompts, table_rows, tokens, self._tiles[rows, tokens])
        return rows, self._graphs[rows, tokens], sample_chunks

    def _capture(self, rows: int, tokens: int, capture: Capture) -> Run:
        make_decodes, prompts = self._decodes.padding(rows), self._prompts.padding(tokens)
        tiles = self._tiles[rows, tokens] = StaticTiles(tokens, MOST_PROMPTS, prompts.slots.device, num_decodes=rows)

        def forward() -> None:
            logits = self._forward(_together(make_decodes(), prompts, tiles))
            self._decodes.logits[:rows].copy_(logits[:rows])
            self._prompts.logits.copy_(logits[rows:])

        return capture(forward)


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
