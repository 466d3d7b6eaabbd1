"""Attention over a cache of latent vectors (multi-head latent attention) by Triton kernels, with absorbed products.

One kernel computes prompts and decodes. Its programs work through plans, like those of prompts in `triton_attention`. A
plan has tiles of heads instead of key heads.
"""

from __future__ import annotations

import functools

import torch
import triton

from oaiserve.engine.decoder.description import RotaryTable
from oaiserve.engine.model.attention import Angles, Scoring
from oaiserve.engine.model.batch import Batch
from oaiserve.plugins.cuda.executor import triton_attention
from oaiserve.plugins.cuda.executor.launches import present
from oaiserve.plugins.cuda.executor.triton_attention import LARGE_SM_BYTES, Card, Plans, Tile
from oaiserve.plugins.cuda.executor.triton_latent_kernels import latent_kernel, latent_write_kernel

MOST_ROWS = 32  # heads times tokens of a tile; with 64, threads spill registers on every card


class TritonLatentAttention:
    """The attention of one step over latent vectors. Sums are in float32."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._plans = Plans(batch)

    def write(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        shared: torch.Tensor,
        cache: torch.Tensor,
        rotary: RotaryTable | None,
        angles: Angles,
    ) -> torch.Tensor:
        """Do the same as `PlainLatentAttention.write`, in one kernel."""
        batch = self._batch
        num_tokens, heads, key_dim = query.shape
        rank = latent.shape[1]
        width = shared.shape[1]
        positions, cosines, sines = (batch.positions, latent, latent) if rotary is None else angles(rotary)
        absorbed = query.new_empty(num_tokens, heads, rank + width)
        latent_write_kernel[(num_tokens,)](
            *(query, absorbed, latent, shared, batch.slots, present(batch.decode_slots, batch.slots), cache),
            *(positions, cosines, sines),
            0 if batch.decode_slots is None else len(batch.decode_slots),
            *(query.stride(0), latent.stride(0), shared.stride(0)),
            OWN=key_dim - width,
            **_dims(heads, rank, width),
            TILE_HEADS=triton.next_power_of_2(heads),
            ROTARY_DIM=0 if rotary is None else 2 * cosines.shape[1],
            APART=1 if rotary is None or rotary.is_interleaved else rotary.apart,
            num_warps=8,
        )
        return absorbed

    def attend(self, query: torch.Tensor, cache: torch.Tensor, rank: int, scoring: Scoring) -> torch.Tensor:
        """Do the same as `PlainLatentAttention.attend`, in one kernel."""
        assert (scoring.softcap, scoring.sinks) == (None, None), "no family has these with latent vectors"
        batch = self._batch
        out = query.new_empty(*query.shape[:2], rank)
        if batch.num_decodes:
            self._attend(query, cache, scoring, out, of_decodes=True)
        if batch.num_decodes < len(batch.query_lens):
            self._attend(query, cache, scoring, out, of_decodes=False)
        return out

    def _attend(
        self, query: torch.Tensor, cache: torch.Tensor, scoring: Scoring, out: torch.Tensor, *, of_decodes: bool
    ) -> None:
        batch = self._batch
        heads = query.shape[1]
        longest = 1 if of_decodes else max(batch.query_lens[batch.num_decodes :])
        tile = latent_tile(heads, longest, query.element_size(), triton_attention.card_of(query.device))
        tile_heads = min(tile.rows, triton.next_power_of_2(heads))
        head_tiles = -(-heads // tile_heads)
        tile_tokens = tile.rows // tile_heads
        window = scoring.sliding_window or 0
        plan = self._plans(window, head_tiles, tile_tokens, of_decodes=of_decodes)
        places = plan.num_places, head_tiles, tile.rows
        latent_kernel[(head_tiles * len(plan.items),)](
            *(query, out),
            torch.empty(*places, out.shape[2], dtype=torch.float32, device=out.device),
            torch.empty(places, dtype=torch.float32, device=out.device),
            *(cache, *plan[:3], batch.query_start, batch.seq_lens, batch.block_tables, batch.table_rows),
            triton_attention.scalars(scoring)[0],
            0 if of_decodes else batch.num_decodes,
            *(query.stride(0), batch.block_tables.stride(0)),
            WINDOW=window,
            **_dims(heads, out.shape[2], cache.shape[3] - out.shape[2]),
            TILE_HEADS=tile_heads,
            BLOCK_SIZE=cache.shape[1],
            ITEM_ALIGNMENT=plan.alignment,
            TILE_ROWS=tile.rows,
            TILE_N=tile.tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


@functools.cache
def latent_tile(heads: int, longest_query: int, itemsize: int, card: Card) -> Tile:
    """Return the tile for sequences of up to `longest_query` tokens. It has the heads of one or of several tokens."""
    if itemsize == 4:  # float32 is used only for comparisons
        return Tile(16, tokens=16, num_warps=8, num_stages=1)
    rows = max(16, triton.next_power_of_2(heads)) if longest_query == 1 else MOST_ROWS
    tokens = 32 if card.sm_bytes >= LARGE_SM_BYTES else 16
    return Tile(min(rows, MOST_ROWS), tokens, num_warps=8, num_stages=2)


@functools.cache
def _dims(heads: int, rank: int, shared: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "RANK": rank,
        "SHARED": shared,
        "TILE_RANK": max(16, triton.next_power_of_2(rank)),
        "TILE_SHARED": max(16, triton.next_power_of_2(shared)),
    }
