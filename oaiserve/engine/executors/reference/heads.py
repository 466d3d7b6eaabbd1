"""The parts of a layer's attention around the scores: projection to heads, norms, rotation and latent vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Attention, HeadRows, LatentProjection, Matrix, Norm, RotaryTable
from oaiserve.engine.executors.reference.attention import PagedAttention
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import Batch


@dataclass(frozen=True, slots=True)
class Attending:
    batch: Batch
    products: Products
    paged: PagedAttention

    def __call__(self, attention: Attention, x: Tensor, cache: LayerCache) -> Tensor:
        """Return the output float32 [T, width] of a layer's attention for the normed hidden state [T, width]."""
        if isinstance(attention.qkv, LatentProjection):
            attended = self._latent(attention, attention.qkv, x, cache)
        else:
            attended = self._plain(attention, attention.qkv, x, cache)
        attended = attended.flatten(1)
        if attention.gate is not None:
            attended = attended * self.products(x, attention.gate).sigmoid()
        return self.products(attended, attention.out)

    def _plain(self, attention: Attention, qkv: list[Matrix], x: Tensor, cache: LayerCache) -> Tensor:
        heads = attention.heads
        kv_heads = attention.shape.kv_heads
        rows = torch.cat([self.products(x, matrix) for matrix in qkv], dim=-1)
        query, key, value = rows.split(attention.sizes, dim=-1)
        query = normed_and_rotated(attention, query.unflatten(1, (heads, -1)), attention.query_norm, self.batch)
        if attention.cache_of is not None:
            return self._attend(attention, query, cache)
        key = key.unflatten(1, (kv_heads, -1))
        value = normed(key if attention.values_of_keys else value.unflatten(1, (kv_heads, -1)), attention.value_norm)
        key = normed_and_rotated(attention, key, attention.key_norm, self.batch)
        return self._attend_new(attention, query, key, value, cache)

    def _latent(self, attention: Attention, qkv: LatentProjection, x: Tensor, cache: LayerCache) -> Tensor:
        """Return the attention of heads whose keys and values are computed from one latent vector per token.

        The cache has keys and values, or the latent vector and the shared numbers of keys. In the latter case, a head's
        query is multiplied by the rows that would make its keys, q (W c) = (q W) c, and the sum of latent vectors by
        those that would make its values.
        """
        heads = attention.heads
        shape = attention.shape
        own = attention.rotary_offset
        rank = len(qkv.norm.weight)
        low = x
        if qkv.query_down is not None:
            low = normed(self.products(x, qkv.query_down), qkv.query_norm)
        query = self.products(low, qkv.query).unflatten(1, (heads, -1))
        own_query, shared_query = query.split([own, shape.key_dim - own], dim=-1)
        shared_query = rotated(attention.rotary, shared_query, 0, self.batch)
        latent, shared_key = self.products(x, qkv.down).split([rank, shape.key_dim - own], dim=-1)
        latent = qkv.norm(latent)
        shared_key = rotated(attention.rotary, shared_key[:, None], 0, self.batch)
        if not shape.latent_dim:
            own_key, value = self.products(latent, qkv.up).unflatten(1, (heads, -1)).split([own, shape.value_dim], -1)
            key = torch.cat([own_key, shared_key.expand(-1, heads, -1)], dim=-1)
            query = torch.cat([own_query, shared_query], dim=-1)
            return self._attend_new(attention, query, key, value, cache)
        self.paged.write(cache.keys, torch.cat([latent[:, None], shared_key], dim=-1))
        to_keys = HeadRows(qkv.up, heads, 0, own, is_transposed=True)
        query = torch.cat([self.products.of_heads(own_query, to_keys), shared_query], dim=-1)
        attended = self._attend(attention, query, LayerCache(cache.keys, cache.keys[..., :rank]))
        to_values = HeadRows(qkv.up, heads, own, shape.value_dim, is_transposed=False)
        return self.products.of_heads(attended, to_values)

    def _attend_new(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        """Write keys and values into the cache. Return the attention float32 [T, heads, value_dim] of the queries."""
        for blocks, new, scale in zip(cache, (key, value), cache.scales, strict=True):
            self.paged.write(blocks, new, scale)
        return self._attend(attention, query, cache)

    def _attend(self, attention: Attention, query: Tensor, cache: LayerCache) -> Tensor:
        query = scaled_queries(attention, query, self.batch)
        return self.paged.attend(query, cache, attention.parameters, attention.sinks)


def scaled_queries(attention: Attention, query: Tensor, batch: Batch) -> Tensor:
    """Return queries [T, heads, key_dim] times the factors of their positions, if the layer has any."""
    if attention.query_factors is None:
        return query
    return query * attention.query_factors[batch.positions][:, None, None]


def normed_and_rotated(attention: Attention, x: Tensor, norm: Norm | None, batch: Batch) -> Tensor:
    """Return queries or keys float32 [T, heads, key_dim], normed and rotated in the order of the layer."""
    if attention.rotates_before_norms:
        return normed(rotated(attention.rotary, x, attention.rotary_offset, batch), norm)
    return rotated(attention.rotary, normed(x, norm), attention.rotary_offset, batch)


def rotated(table: RotaryTable | None, x: Tensor, offset: int, batch: Batch) -> Tensor:
    """Return queries or keys float32 [T, heads, dim] with the pairs from number `offset` on rotated by position."""
    if table is None:
        return x
    pairs = table.cosines.shape[1]
    if table.axes is not None and batch.axes is not None:
        positions = batch.axes[table.axes.long()].T  # [T, pairs]
        places: Any = positions, torch.arange(pairs, device=x.device)
    else:
        places = batch.positions
    cosines = table.cosines[places][:, None]
    sines = table.sines[places][:, None]
    step, apart = (2, 1) if table.is_interleaved else (1, table.apart)
    first = slice(offset, offset + step * pairs, step)
    second = slice(offset + apart, offset + apart + step * pairs, step)
    out = x.clone()
    out[..., first] = x[..., first] * cosines - x[..., second] * sines
    out[..., second] = x[..., second] * cosines + x[..., first] * sines
    return out


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Return `x` [T, ...] with a norm for each run of numbers as wide as the norm: a head, or all heads together."""
    if norm is None:
        return x
    return norm(x.reshape(-1, len(norm.weight))).view(x.shape)
