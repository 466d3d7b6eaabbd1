"""Attention to a cache of latent vectors (multi-head latent attention) by Triton kernels, with absorbed products.

Prompts and decodes are computed by one kernel, whose programs work through plans as those of prompts in
`triton_attention` do. A plan has tiles of heads in place of key heads.
"""

from __future__ import annotations

import functools

import torch
import triton

from oaiserve.engine.executors.cuda import triton_attention
from oaiserve.engine.executors.cuda.launches import present
from oaiserve.engine.executors.cuda.triton_attention import (
    LARGE_SM_BYTES,
    Card,
    PrefillPlan,
    Tile,
    num_items,
    plan_prefills,
)
from oaiserve.engine.executors.cuda.triton_latent_kernels import latent_kernel, latent_write_kernel
from oaiserve.engine.model.attention import LayerCache, Scoring
from oaiserve.engine.model.batch import Batch

MOST_ROWS = 32  # heads times tokens of a tile: with 64, threads spill registers on every card


class TritonLatentAttention:
    """The attention of one step to latent vectors. Sums are in float32."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._plans: dict[tuple[int, int, int, bool], PrefillPlan] = {}

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: LayerCache,
        scoring: Scoring,
    ) -> torch.Tensor:
        """Write the latent vectors `key` [T, 1, rank + shared], and return the attention [T, heads, rank] of queries
        [T, heads, rank + shared]. The values of the cache are the first numbers of its keys."""
        assert key is not None
        assert value is None
        assert (scoring.softcap, scoring.sinks) == (None, None), "no family has these with latent vectors"
        batch = self._batch
        query = query.contiguous()
        out = query.new_empty(*query.shape[:2], cache.values.shape[3])
        width = key.shape[2]
        latent_write_kernel[(len(key),)](
            *(key, batch.slots, present(batch.decode_slots, batch.slots), cache.keys),
            *(0 if batch.decode_slots is None else len(batch.decode_slots), key.stride(0)),
            DIM=width,
            TILE_DIM=triton.next_power_of_2(width),
        )
        if batch.num_decodes:
            self._attend(query, cache, scoring, out, of_decodes=True)
        if batch.num_decodes < len(batch.query_lens):
            self._attend(query, cache, scoring, out, of_decodes=False)
        return out

    def _attend(
        self, query: torch.Tensor, cache: LayerCache, scoring: Scoring, out: torch.Tensor, *, of_decodes: bool
    ) -> None:
        batch = self._batch
        heads = query.shape[1]
        longest = 1 if of_decodes else max(batch.query_lens[batch.num_decodes :])
        tile = latent_tile(heads, longest, query.element_size(), triton_attention.card_of(query.device))
        constants = _constants(heads, tile.rows, *cache.keys.shape[1::2], cache.values.shape[3])
        head_tiles = -(-heads // constants["TILE_HEADS"])
        tile_tokens = tile.rows // constants["TILE_HEADS"]
        window = scoring.sliding_window or 0
        key = window, head_tiles, tile_tokens, of_decodes
        if key not in self._plans:
            wanted = num_items(head_tiles, 1, query.device)
            self._plans[key] = plan_prefills(batch, window, wanted, head_tiles, tile_tokens, of_decodes=of_decodes)
        plan = self._plans[key]
        places = plan.num_places, head_tiles, tile.rows
        latent_kernel[(head_tiles * len(plan.items),)](
            *(query, out),
            torch.empty(*places, out.shape[2], dtype=torch.float32, device=out.device),
            torch.empty(places, dtype=torch.float32, device=out.device),
            *(cache.keys, *plan[:3], batch.query_start, batch.seq_lens, batch.block_tables, batch.table_rows),
            triton_attention.scalars(scoring)[0],
            0 if of_decodes else batch.num_decodes,
            *(query.stride(0), batch.block_tables.stride(0)),
            WINDOW=window,
            ITEM_ALIGNMENT=plan.alignment,
            TILE_N=tile.tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **constants,
        )


@functools.cache
def latent_tile(heads: int, longest_query: int, itemsize: int, card: Card) -> Tile:
    """Return the tile for sequences of up to `longest_query` tokens: of one token's heads, or of several tokens."""
    if itemsize == 4:  # float32 serves comparisons
        return Tile(16, tokens=16, num_warps=8, num_stages=1)
    rows = max(16, triton.next_power_of_2(heads)) if longest_query == 1 else MOST_ROWS
    tokens = 32 if card.sm_bytes >= LARGE_SM_BYTES else 16
    return Tile(min(rows, MOST_ROWS), tokens, num_warps=8, num_stages=2)


@functools.cache
def _constants(heads: int, rows: int, block_size: int, width: int, rank: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "TILE_HEADS": min(rows, triton.next_power_of_2(heads)),
        "RANK": rank,
        "SHARED": width - rank,
        "TILE_RANK": max(16, triton.next_power_of_2(rank)),
        "TILE_SHARED": max(16, triton.next_power_of_2(width - rank)),
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": rows,
    }
