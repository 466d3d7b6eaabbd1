"""The reference backend: attention in plain torch, on any device. Tests compare the other backends with it."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from oaiserve.engine.model.attention import FP8, FP8_MAX, LayerCache, Scoring
from oaiserve.engine.model.batch import Batch


class ReferenceAttention:
    """The attention of one step in plain torch, with each mask made once.

    All decodes are one batch, padded to the longest sequence, and each prefill is computed separately.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._tables = batch.own_tables()
        self._masks: dict[tuple[int | None, bool], list[torch.Tensor]] = {}  # by sliding window, and what looks ahead

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cache: LayerCache, scoring: Scoring
    ) -> torch.Tensor:
        batch = self._batch
        kind = (scoring.sliding_window, scoring.looks_ahead)
        for blocks, new, scale in zip(cache, (key, value), cache.scales, strict=True):
            _write(blocks.flatten(0, 1), batch.slots, new, scale)
        if kind not in self._masks:
            self._masks[kind] = _masks(batch, *kind)
        masks = self._masks[kind]
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[-1])
        num_decodes = batch.num_decodes
        if num_decodes:
            keys, values = gather(cache, self._tables[:num_decodes], masks[0].shape[-1], query.dtype)
            decodes = query[:num_decodes].unsqueeze(2)  # [B, heads, 1, dim]
            out[:num_decodes] = _attention(decodes, keys, values, masks[0], scoring).squeeze(2)
            masks = masks[1:]
        first = num_decodes
        for row, mask in enumerate(masks, start=num_decodes):
            last = first + batch.query_lens[row]
            keys, values = gather(cache, self._tables[row : row + 1], batch.context_lens[row], query.dtype)
            prefill = query[None, first:last].transpose(1, 2)  # [1, heads, query_len, dim]
            out[first:last] = _attention(prefill, keys, values, mask, scoring)[0].transpose(0, 1)
            first = last
        return out


def _masks(batch: Batch, sliding_window: int | None, looks_ahead: bool) -> list[torch.Tensor]:
    """Return one mask for all decodes together, if the batch has decodes, then one mask for each prefill."""
    masks = []
    num_decodes = batch.num_decodes
    last_visible = batch.last_visible if looks_ahead else None
    if num_decodes:
        length = max(batch.context_lens[:num_decodes])
        masks.append(_mask(batch.seq_lens[:num_decodes, None] - 1, length, sliding_window))
    first = num_decodes
    for query_len, length in zip(batch.query_lens[num_decodes:], batch.context_lens[num_decodes:], strict=True):
        queries = torch.arange(length - query_len, length, device=batch.slots.device)
        ends = None if last_visible is None else last_visible[None, first : first + query_len]
        masks.append(_mask(queries[None], length, sliding_window, ends))
        first += query_len
    return masks


def _write(slots: torch.Tensor, places: torch.Tensor, new: torch.Tensor, scale: float) -> None:
    """Write keys or values into their slots, divided by their scale where the cache has eight bits."""
    if slots.dtype == FP8:
        new = (new.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        slots = slots.view(torch.uint8)
    slots[places] = new


def gather(
    cache: LayerCache, block_tables: torch.Tensor, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and the values of whole sequences: two tensors [B, kv_heads, length, dim]."""
    tables = block_tables[:, : -(-length // cache.keys.shape[1])]

    def of_blocks(blocks: torch.Tensor, scale: float) -> torch.Tensor:
        # index_select copies whole blocks; indexing with the table is seven times as slow on a CPU.
        is_scaled = blocks.dtype == FP8
        numbers = blocks.view(torch.uint8) if is_scaled else blocks
        rows = numbers.flatten(1).index_select(0, tables.flatten())
        if is_scaled:
            rows = (rows.view(FP8).float() * scale).to(dtype)
        return rows.view(tables.shape[0], -1, *blocks.shape[2:])[:, :length].transpose(1, 2)

    keys, values = (of_blocks(blocks, scale) for blocks, scale in zip(cache, cache.scales, strict=True))
    return keys, values


def _mask(
    queries: torch.Tensor, length: int, sliding_window: int | None, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which of `length` keys each query may see, up to its own or to `ends`: bool [B, 1, Q, length].

    `queries` and `ends`, both [B, Q], are indices of tokens in their sequences.
    """
    keys = torch.arange(length, device=queries.device)
    visible = (queries if ends is None else ends)[:, :, None] >= keys
    if sliding_window is not None:
        visible &= queries[:, :, None] - keys < sliding_window
    return visible.unsqueeze(1)


def _attention(
    query: torch.Tensor,  # [B, heads, Q, key_dim]
    key: torch.Tensor,  # [B, kv_heads, L, key_dim]
    value: torch.Tensor,  # [B, kv_heads, L, value_dim]
    mask: torch.Tensor,  # [B, 1, Q, L]
    scoring: Scoring,
) -> torch.Tensor:  # [B, heads, Q, value_dim]
    groups = query.shape[1] // key.shape[1]
    scaling, _, softcap, sinks, _ = scoring
    is_plain = softcap is None and sinks is None
    if is_plain and query.shape[2] == 1:
        # The query heads that share a key head are rows of one query: six times as fast as grouped attention on a CPU.
        rows = query.reshape(query.shape[0], key.shape[1], groups, query.shape[3])
        return scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling).flatten(1, 2).unsqueeze(2)
    if is_plain:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores.float(), sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value
