"""Attention over a paged KV cache, in plain torch, with memory that doesn't grow with the context.

For a query with scores s_j of its keys, attention is sum_j exp(s_j) v_j / sum_j exp(s_j). Keys and values are read in
pieces. Three numbers are carried from piece to piece: the largest score m so far, l = sum_j exp(s_j - m), and the
vector a = sum_j exp(s_j - m) v_j. With M = max(m, max_j s_j) over the next piece, they become

    l = l exp(m - M) + sum_j exp(s_j - M)        a = a exp(m - M) + sum_j exp(s_j - M) v_j        m = M

and the result is a / l. This is the online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3) as
Rabe and Staats apply it to attention (2021, arXiv:2112.05682). Everything is computed in float32.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import AttentionParameters
from oaiserve.engine.model.attention import FP8, FP8_MAX, LayerCache, Scoring
from oaiserve.engine.model.batch import Batch

PIECE_TOKENS = 2048  # number of keys and values gathered at once, for all sequences of a group together
TILE_QUERIES = 64  # tokens whose scores are computed at once
GROUP_DECODES = 32  # sequences with one token each that are computed together
_LEAST = torch.finfo(torch.float32).min  # finite, so that subtracting it from itself gives 0


class _Group(NamedTuple):
    """Sequences that have the same number of tokens in a step. Indices count the tokens of each sequence."""

    rows: slice  # rows of the step's tokens
    tables: Tensor  # int64 [B, M], the blocks of each sequence
    lengths: Tensor  # int64 [B, 1], cached tokens including this step's
    queries: Tensor  # int64 [B, Q], the index of each query
    last: Tensor | None  # int64 [B, Q], the index of the last key that each query sees; None: its own
    start: int  # the smallest index of a query
    end: int  # the length of the longest sequence


class PagedAttention:
    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    @cached_property
    def _groups(self) -> list[_Group]:
        return _groups(self._batch)

    def write(self, blocks: Tensor, new: Tensor, scale: float = 1.0) -> None:
        """Write keys or values [T, kv_heads, dim] into their slots of a cache [num_blocks, block_size, kv_heads, dim].

        An 8-bit cache stores them divided by `scale`.
        """
        slots = blocks.flatten(0, 1)
        if blocks.dtype == FP8:
            new = (new.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
            slots = slots.view(torch.uint8)
        slots[self._batch.slots] = new.to(slots.dtype)

    def attend(self, query: Tensor, cache: LayerCache, parameters: AttentionParameters, sinks: Tensor | None) -> Tensor:
        """Return the attention float32 [T, heads, value_dim] of queries [T, heads, key_dim]. Keys are in the cache."""
        shape = (*query.shape[:2], cache.values.shape[-1])
        out = torch.empty(shape, dtype=torch.float32, device=query.device)
        for group in self._groups:
            of_group = query[group.rows].float().unflatten(0, group.queries.shape)
            out[group.rows] = _attend(of_group, group, cache, parameters, sinks).flatten(0, 1)
        return out


def _groups(batch: Batch) -> list[_Group]:
    """Split a step into groups: up to GROUP_DECODES decodes, or the tokens of one prompt."""
    num_decodes = batch.num_decodes
    chunks = [(first, min(first + GROUP_DECODES, num_decodes)) for first in range(0, num_decodes, GROUP_DECODES)]
    chunks += [(index, index + 1) for index in range(num_decodes, len(batch.query_lens))]
    tables = batch.own_tables()
    groups: list[_Group] = []
    first_row = 0
    for first, end in chunks:
        num_tokens = batch.query_lens[first]
        rows = slice(first_row, first_row + (end - first) * num_tokens)
        first_row = rows.stop
        lengths = batch.seq_lens[first:end, None]
        queries = lengths - num_tokens + torch.arange(num_tokens, device=lengths.device)
        if batch.last_visible is None:
            last = None
        else:
            last = batch.last_visible[rows].view(queries.shape)
        context_lens = batch.context_lens[first:end]
        start = min(context_lens) - num_tokens
        groups.append(_Group(rows, tables[first:end], lengths, queries, last, start, max(context_lens)))
    return groups


def _attend(
    query: Tensor,  # float32 [B, Q, heads, key_dim]
    group: _Group,
    cache: LayerCache,
    parameters: AttentionParameters,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention float32 [B, Q, heads, value_dim] of a group of sequences."""
    kv_heads, value_dim = cache.values.shape[2:]
    num_sequences, num_queries = query.shape[:2]
    window = parameters.sliding_window
    chunk = parameters.chunk
    last = group.last if parameters.looks_ahead else None
    query = query.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, kv_heads, heads of each, Q, key_dim]
    # A sink is one more key, whose value is 0. All queries see it before any other.
    most = query.new_full((*query.shape[:-1], 1), _LEAST)
    total = torch.zeros_like(most)
    if sinks is not None:
        most = most.copy_(sinks.view(kv_heads, -1, 1, 1))
        total = torch.ones_like(most)
    out = query.new_zeros(*query.shape[:-1], value_dim)
    at_once = max(1, PIECE_TOKENS // num_sequences)
    for first_key in range(_first_key(group.start, window, chunk), group.end, at_once):
        end_key = min(first_key + at_once, group.end)
        keys, values = _gather(cache, group, first_key, end_key)
        places = torch.arange(first_key, end_key, device=query.device)
        for first in range(0, num_queries, TILE_QUERIES):
            end = min(first + TILE_QUERIES, num_queries)
            last_query = group.end - num_queries + end - 1
            if (last is None and first_key > last_query) or end_key <= _first_key(group.start + first, window, chunk):
                continue  # No query of the tile sees a key of the piece.
            tile = slice(first, end)
            own = group.queries[:, tile, None]
            visible = places <= (own if last is None else last[:, tile, None])
            if window is not None:
                visible &= own - places < window
            if chunk is not None:
                visible &= own // chunk == places // chunk
            scores = (query[:, :, :, tile].flatten(2, 3) @ keys.mT).unflatten(2, (-1, end - first))
            scores *= parameters.scaling
            if parameters.softcap:
                scores = scores.div_(parameters.softcap).tanh_().mul_(parameters.softcap)
            scores.masked_fill_(~visible[:, None, None], -torch.inf)
            before = most[:, :, :, tile]
            largest = torch.maximum(before, scores.amax(-1, keepdim=True))
            factor = (before - largest).exp()
            weights = scores.sub_(largest).exp_()
            total[:, :, :, tile] = total[:, :, :, tile] * factor + weights.sum(-1, keepdim=True)
            added = (weights.flatten(2, 3) @ values).unflatten(2, (-1, end - first))
            out[:, :, :, tile] = out[:, :, :, tile] * factor + added
            most[:, :, :, tile] = largest
    return (out / total).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _first_key(query: int, window: int | None, chunk: int | None) -> int:
    """Return the index of the first key that the query at this index sees."""
    first = 0 if window is None else max(0, query - window + 1)
    if chunk is None:
        return first
    return max(first, query // chunk * chunk)


def _gather(cache: LayerCache, group: _Group, first: int, end: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values float32 [B, kv_heads, end - first, dim] of tokens `first` to before `end`.

    Values beyond the end of a sequence are 0: its last block may hold NaN there, and NaN times a weight of 0 is NaN.
    """
    _, block_size, kv_heads, _ = cache.keys.shape
    places = torch.arange(first, end, device=group.tables.device)
    slots = group.tables[:, places // block_size] * block_size + places % block_size
    rows = slots[:, None] * kv_heads + torch.arange(kv_heads, device=slots.device)[:, None]  # [B, kv_heads, L]
    keys, values = (
        in_float32(blocks.flatten(0, 2), rows.flatten(), scale).unflatten(0, rows.shape)
        for blocks, scale in zip(cache, cache.scales, strict=True)
    )
    return keys, values.masked_fill_((places >= group.lengths)[:, None, :, None], 0)


def in_float32(numbers: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Return a copy of some rows of keys or values in float32."""
    if numbers.dtype == FP8:  # torch can't copy 8-bit floats by index.
        return numbers.view(torch.uint8).index_select(0, rows).view(FP8).float() * scale
    return numbers.index_select(0, rows).float()


class PlainAttention:
    """The attention of one step in plain torch, with memory that doesn't grow with the context."""

    def __init__(self, batch: Batch) -> None:
        self._paged = PagedAttention(batch)

    def __call__(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: LayerCache, scoring: Scoring
    ) -> Tensor:
        for blocks, new, scale in zip(cache, (key, value), cache.scales, strict=True):
            if new is not None:
                self._paged.write(blocks, new, scale)
        return self._paged.attend(query, cache, scoring.parameters, scoring.sinks).to(query.dtype)
