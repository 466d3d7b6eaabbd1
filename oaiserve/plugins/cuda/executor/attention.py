"""Attention by a backend, with one product for queries, keys and values. The backend may also norm and rotate them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Attention, HeadRows, LatentProjection, Norm, NotKnown, RotaryTable
from oaiserve.engine.executors.reference.attention import PagedAttention
from oaiserve.engine.executors.reference.heads import Attending, normed_and_rotated, scaled_queries
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention import LayerCache, Rotation, Scoring, StepAttention
from oaiserve.engine.model.batch import Batch, CapturedAdapters
from oaiserve.plugins.cuda.executor.device_matrices import Rounded, new_rounded
from oaiserve.plugins.cuda.executor.kernels import Kernels, PlainLatentAttention
from oaiserve.plugins.cuda.executor.place import PLACED, JoiningPlacing
from oaiserve.plugins.cuda.executor.products import StepProducts

if TYPE_CHECKING:  # The import needs Triton.
    from oaiserve.plugins.cuda.executor.triton_latent import TritonLatentAttention


class CudaStep:
    """The parts of one step that its layers share."""

    def __init__(
        self,
        batch: Batch,
        dtype: torch.dtype,
        kernels: Kernels,
        adapters: CapturedAdapters | None = None,
        rounded_columns: int | None = None,
    ) -> None:
        """`adapters` add to products, instead of the batch's adapters.

        If `rounded_columns` is not None and products of this many rows round their inputs, kernels also write the
        inputs in 8-bit floats, with a scale for each `rounded_columns`.
        """
        self.batch = batch
        self.dtype = dtype
        self.kernels = kernels
        self.products = StepProducts(batch, dtype, kernels, adapters)
        self.attention = kernels.attention(batch)
        self.rotates = getattr(self.attention, "rotates", False)
        does_round = kernels.operations is not layer_operations and kernels.ways.rounds(len(batch.input_ids))
        self._rounded_columns = rounded_columns if does_round else None
        self._angles: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # keyed by the id of the table

    def angles(self, table: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows int64 [T] of cosines and sines float32 [rows, pairs], by which the step's tokens are rotated."""
        if table.axes is None or self.batch.axes is None:
            return self.batch.positions, table.cosines, table.sines
        if id(table) not in self._angles:  # Each token has its own angles.
            places = self.batch.axes.index_select(0, table.axes).T
            rows = torch.arange(len(places), device=places.device)
            self._angles[id(table)] = rows, table.cosines.gather(0, places), table.sines.gather(0, places)
        return self._angles[id(table)]

    def new_rounded(self, columns: int, *, in_groups: bool = False) -> Rounded | None:
        """Return rows that a kernel fills in addition to its result, already rounded for the next product.

        Returns None if that product doesn't round its input, or only in whole rows although `in_groups` is set.
        """
        group = self._rounded_columns
        if group is None or (in_groups and not group) or (group and columns % group):
            return None
        return new_rounded(len(self.batch.input_ids), columns, group, self.batch.input_ids.device)

    @cached_property
    def latent(self) -> LatentAttending:
        return LatentAttending(self.batch, self.products, PagedAttention(self.batch), self.attention, self.dtype)

    @cached_property
    def latent_attention(self) -> PlainLatentAttention | TritonLatentAttention:
        return self.kernels.latent_attention(self.batch)


@dataclass(frozen=True, slots=True)
class LatentAttending(Attending):
    """The attention of layers with latent vectors over a cache of keys and values, by the backend."""

    backend: StepAttention
    dtype: torch.dtype

    def _attend_new(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, cache: LayerCache) -> Tensor:
        query = scaled_queries(attention, query, self.batch)
        query, key, value = (numbers.to(self.dtype) for numbers in (query, key, value))
        return self.backend(query, key, value, cache, _scoring(attention)).float()


class AttentionLayer:
    """The attention of a layer whose queries, keys and values are products of the hidden state."""

    def __init__(self, attention: Attention, placing: JoiningPlacing) -> None:
        assert isinstance(attention.qkv, list)
        shape = attention.shape
        matrices = [*attention.qkv]
        self._sizes = [*attention.sizes]
        if attention.gate is not None:
            matrices.append(attention.gate)
            self._sizes.append(attention.heads * shape.value_dim)
        self._inputs = placing.joined(matrices)
        self._out = placing.joined([attention.out])
        self._attention: Attention = placing.part(replace(attention, qkv=[], gate=None, out=PLACED))
        self._scoring = _scoring(self._attention)
        self._has_keys = attention.cache_of is None
        self._can_rotate_inside = self._has_keys and attention.rotary_offset == 0 and not attention.rotates_before_norms
        # The norms that the backend computes before it rotates.
        self._norms = _norms_of_heads(self._attention) if attention.query_factors is None else {}

    def __call__(self, x: Tensor, step: CudaStep, cache: LayerCache) -> Tensor:
        """Return the output [T, width] for the normed hidden state [T, width]."""
        attention = self._attention
        kv_heads = attention.shape.kv_heads
        query, new_keys, new_values, *gates = step.products.joined(x, self._inputs).split(self._sizes, dim=-1)
        query = query.unflatten(1, (attention.heads, -1))
        key: Tensor | None = None
        value: Tensor | None = None
        if self._has_keys:
            key = new_keys.unflatten(1, (kv_heads, -1))
            value = key if attention.values_of_keys else new_values.unflatten(1, (kv_heads, -1))
            value = _normed(value, attention.value_norm, step)
        options: dict[str, Any] = {}
        if self._can_rotate_inside and step.rotates:
            assert key is not None
            if not self._norms:
                query = _normed(query, attention.query_norm, step)
                key = _normed(key, attention.key_norm, step)
            query = scaled_queries(attention, query, step.batch).to(x.dtype)  # The rotation after this is linear.
            if attention.rotary is not None or self._norms:
                options["rotation"] = self._rotation(step)
        else:
            query = self._turned(query, attention.query_norm, step, is_query=True)
            if key is not None:
                key = self._turned(key, attention.key_norm, step)
        attended = step.attention(query, key, value, cache, self._scoring, **options).flatten(1)
        for gate in gates:
            attended = attended * gate.sigmoid()
        return step.products.joined(attended, self._out)

    def _rotation(self, step: CudaStep) -> Rotation:
        """Return how the backend norms and rotates queries and keys."""
        table = self._attention.rotary
        if table is None:
            return Rotation(step.batch.positions, None, None, apart=0, **self._norms)
        return Rotation(*step.angles(table), 1 if table.is_interleaved else table.apart, **self._norms)

    def _turned(self, heads: Tensor, norm: Norm | None, step: CudaStep, *, is_query: bool = False) -> Tensor:
        """Return queries or keys [T, heads, key_dim], normed, rotated and scaled in plain torch."""
        has_factors = is_query and self._attention.query_factors is not None
        if not self._attention.rotates_before_norms:
            heads = _normed(heads, norm, step)
            norm = None
        if norm is None and self._attention.rotary is None and not has_factors:
            return heads
        turned = normed_and_rotated(self._attention, heads.float(), norm, step.batch)
        if has_factors:
            turned = scaled_queries(self._attention, turned, step.batch)
        return turned.to(heads.dtype)


class LatentLayer:
    """The attention of a layer with latent vectors, as the reference computes it. The cache has keys and values."""

    def __init__(self, attention: Attention, placing: JoiningPlacing) -> None:
        self._attention: Attention = placing.part(attention)

    def __call__(self, x: Tensor, step: CudaStep, cache: LayerCache) -> Tensor:
        """Return the output [T, width] for the normed hidden state [T, width]."""
        return step.latent(self._attention, x.float(), cache).to(x.dtype)


class AbsorbedLayer:
    """The attention of a layer over a cache of latent vectors, by a kernel, with products in the model's dtype.

    A head's query is multiplied by the rows that would compute its keys, and its attention output by the rows that
    would compute its values.
    """

    def __init__(self, attention: Attention, placing: JoiningPlacing) -> None:
        qkv = attention.qkv
        assert isinstance(qkv, LatentProjection)
        first = qkv.query if qkv.query_down is None else qkv.query_down
        self._inputs = placing.joined([first, qkv.down])
        self._rank = len(qkv.norm.weight)
        self._sizes = [len(first.weight), self._rank, len(qkv.down.weight) - self._rank]
        self._query = None if qkv.query_down is None else placing.joined([qkv.query])
        self._query_norm: Norm | None = placing.part(qkv.query_norm)
        self._norm: Norm = placing.part(qkv.norm)
        up = placing.part(qkv.up)
        heads = attention.heads
        own = attention.rotary_offset
        if own + self._sizes[2] != attention.shape.key_dim:
            raise NotKnown(f"its heads have {own} numbers before the {self._sizes[2]} shared ones of a key")
        self._to_keys = HeadRows(up, heads, 0, own, is_transposed=True)
        self._to_values = HeadRows(up, heads, own, attention.shape.value_dim, is_transposed=False)
        self._out = placing.joined([attention.out])
        self._attention: Attention = placing.part(replace(attention, qkv=[], out=PLACED))
        self._scoring = _scoring(self._attention)

    def __call__(self, x: Tensor, step: CudaStep, cache: LayerCache) -> Tensor:
        """Return the output [T, width] for the normed hidden state [T, width]."""
        attention = self._attention
        kernel = step.latent_attention
        products = step.products
        query, latent, shared = products.joined(x, self._inputs).split(self._sizes, dim=-1)
        if self._query is not None:
            query = products.joined(_normed(query, self._query_norm, step), self._query)
        latent = _normed(latent, self._norm, step)
        query = query.unflatten(1, (attention.heads, -1))
        query = scaled_queries(attention, query, step.batch).to(x.dtype)  # The rotation after this is linear.
        absorbed = kernel.write(query, latent, shared, cache.keys, attention.rotary, step.angles)
        absorbed[..., : self._rank] = products.of_heads(query[..., : self._to_keys.count], self._to_keys)
        attended = kernel.attend(absorbed, cache.keys, self._rank, self._scoring)
        return products.joined(products.of_heads(attended, self._to_values).flatten(1).to(x.dtype), self._out)


def attention_layer(attention: Attention, placing: JoiningPlacing) -> AttentionLayer | LatentLayer | AbsorbedLayer:
    if not isinstance(attention.qkv, LatentProjection):
        return AttentionLayer(attention, placing)
    if attention.shape.latent_dim:
        return AbsorbedLayer(attention, placing)
    return LatentLayer(attention, placing)


def _normed(heads: Tensor, norm: Norm | None, step: CudaStep) -> Tensor:
    """Return heads [T, heads, dim], each normed by itself, or all heads of a token together."""
    if norm is None:
        return heads
    rows = heads.reshape(-1, len(norm.weight))
    normed: Tensor = step.kernels.operations.add_and_norm(rows, (), None, norm)[1]
    return normed.view(heads.shape)


def _scoring(attention: Attention) -> Scoring:
    own = attention.parameters
    return Scoring(own.scaling, own.sliding_window, own.softcap or None, attention.sinks, own.looks_ahead)


def _norms_of_heads(attention: Attention) -> dict[str, Any]:
    """Return the norms as fields of a Rotation, if both are root mean squares of each head, as backends require."""
    query_norm = attention.query_norm
    key_norm = attention.key_norm
    if query_norm is None or key_norm is None or query_norm.epsilon != key_norm.epsilon:
        return {}
    for norm in (query_norm, key_norm):
        if norm.bias is not None or norm.subtracts_mean or len(norm.weight) != attention.shape.key_dim:
            return {}
    return {"query_norm": query_norm.weight, "key_norm": key_norm.weight, "epsilon": query_norm.epsilon}
