"""Adds the operations of a decoder to native code's list, from its description."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.checkpoints.progress import Progress
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import (
    MLP,
    Attention,
    Decoder,
    Experts,
    HeadRows,
    InputGate,
    LatentProjection,
    Layer,
    LayerInputs,
    Matrix,
    Norm,
    NotKnown,
    Scales,
    matrices_in,
)
from oaiserve.engine.decoder.reference_only import refuse_reference_only
from oaiserve.engine.executors.native.expert_operations import Buffers, ExpertOperations
from oaiserve.engine.executors.native.kv_layout import LANES, latent_dim, new_cache
from oaiserve.engine.executors.native.library import AttentionOptions, CacheMemory, Library, Normalize, Rotary
from oaiserve.engine.executors.native.mixer_operations import MixerOperations
from oaiserve.engine.executors.native.operation_list import OperationList, whole_lanes
from oaiserve.engine.executors.native.pack_weights import PANEL, WeightPacker
from oaiserve.engine.model.attention import LayerCache


class Operations:
    """The operations of a decoder in native code, with their weights, buffers and caches.

    All of these are referred to by index, as in src/decoder.cpp.
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        weights: WeightPacker,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        has_adapters: bool,
    ) -> None:
        """Add all operations of `decoder` to the native decoder of this `handle`, and their weights to `weights`.

        Raises NotKnown for sizes that the native code does not support, and MemoryError.
        """
        refuse_reference_only(decoder)
        self._operations = operations = OperationList(library, handle, weights, has_adapters=has_adapters)
        self.names = operations.names
        self.sites = operations.sites
        self.caches: list[LayerCache] = []
        self._library = library
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._cache_indices: dict[int, int] = {}  # indices for layers with a cache of their own
        self._make_buffers(decoder)
        self._add_decoder(decoder)

    def _make_buffers(self, decoder: Decoder) -> None:
        operations = self._operations
        floats = operations.floats
        elements = operations.elements
        width = self._width = decoder.embedding.shape[1]
        attention = [layer.attention for layer in decoder.layers if layer.attention is not None]
        self._hidden = floats(width)
        self._branch = floats(width)
        self._normed = elements(width)
        if attention:
            self._qkv = floats(max(_qkv_width(layer) for layer in attention))
            self._queries = elements(
                max(layer.heads * (layer.shape.latent_dim or layer.shape.key_dim) for layer in attention)
            )
        mixers = [layer.mixer for layer in decoder.layers if layer.mixer is not None]
        self._attended = elements(
            max([*(layer.out.weight.shape[1] for layer in attention), *(mixer.out.weight.shape[1] for mixer in mixers)])
        )
        self._mixers = MixerOperations(operations, mixers)
        mlps = [layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp for layer in decoder.layers]
        self._mlp = elements(max((len(mlp.up.weight) for mlp in mlps if mlp is not None), default=LANES))
        mixtures = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]
        buffers = Buffers(width, self._hidden, self._normed, self._branch, self._mlp)
        self._experts = ExpertOperations(operations, mixtures, buffers)
        if latent := [layer.qkv for layer in attention if isinstance(layer.qkv, LatentProjection)]:
            downs = [matrix for qkv in latent for matrix in (qkv.query_down, qkv.down) if matrix is not None]
            most = whole_lanes(max(len(matrix.weight) for matrix in downs))
            self._latent = floats(most)
            self._normed_latent = elements(most)
            self._own = elements(max(layer.heads * layer.rotary_offset for layer in attention))
            self._attended_latent = elements(max(layer.heads * layer.shape.latent_dim for layer in attention))
        if decoder.layer_inputs is not None:
            projected = decoder.layer_inputs.projection.weight
            self._layer_inputs = floats(len(projected))
            self._layer_embeddings = floats(len(projected))
            self._gated = elements(len(decoder.layer_inputs.norm.weight))
        weights = [decoder.embedding, *(matrix.weight for matrix in matrices_in(decoder))]
        inputs = [weight.shape[1] for weight in weights if isinstance(weight, Blocks)]
        if inputs:
            operations.read_in_groups(max(inputs))

    def _add_decoder(self, decoder: Decoder) -> None:
        operations = self._operations
        self._embed(decoder.embedding, self._hidden, decoder.embedding_scale, decoder.position_embedding)
        operations.add("embed", "place_vectors", self._hidden, 0, self._width, decoder.vector_scale)
        if decoder.head.weight is not decoder.embedding:
            operations.weights.num_bytes = 0  # not counted: a step reads only some rows of the table
        if decoder.layer_inputs is not None:
            self._inputs_of_layers(decoder.layer_inputs, len(decoder.layers))
        for index, layer in enumerate(Progress(decoder.layers, desc="Packing weights", unit=" layers")):
            self._layer(index, layer, decoder.residual_scale)
            if index < decoder.num_deep:
                operations.add("embed", "place_vectors", self._hidden, 1 + index, self._width, 1.0)
        last = operations.elements(self._width)
        operations.add("norm", "norm", self._hidden, last, Normalize.of(decoder.final_norm), True)
        head = operations.weights.pack([decoder.head])
        self.weight_bytes = operations.weights.num_bytes
        x = operations.input_of(last, head, of_logits_rows=True)
        operations.add("logits", "logits", x, head, decoder.logits_scale, decoder.logits_softcap)

    def _embed(self, table: Tensor | Blocks, out: int, scale: float, position: Tensor | None = None) -> None:
        operations = self._operations
        if isinstance(table, Blocks):
            if position is not None:
                raise NotKnown("it has an embedding of positions next to a quantized one")
            weights = operations.weights.pack_blocks([table])
            operations.add("embed", "embed_blocks", out, weights, scale)
            return
        rows, width = table.shape
        operations.add("embed", "embed", out, table, rows, position, width, scale)

    def _inputs_of_layers(self, inputs: LayerInputs, layers: int) -> None:
        operations = self._operations
        projection = inputs.projection
        self._norm(None)
        operations.project("layer inputs", self._normed, self._layer_inputs, [projection])
        self._embed(inputs.table, self._layer_embeddings, inputs.table_scale)
        arguments = (self._layer_inputs, self._layer_embeddings, inputs.scale, Normalize.of(inputs.norm))
        operations.add("layer inputs", "layer_inputs", *arguments, layers)

    def _layer(self, index: int, layer: Layer, residual_scale: float) -> None:
        if layer.attention is not None or layer.mixer is not None:
            self._norm(layer.attention_norm)
        scales = layer.scales or Scales()
        if (mixer := layer.mixer) is not None:
            self._mixers.add(mixer, self._normed, self._attended)
            self._add("output", self._attended, mixer.out, layer.attention_out_norm, residual_scale * scales.mixer)
        if (attention := layer.attention) is not None:
            self._attention(index, attention)
            if layer.is_parallel and layer.mlp_norm is not layer.attention_norm:
                self._norm(layer.mlp_norm)
            scale = residual_scale * scales.attention
            self._add("output", self._attended, attention.out, layer.attention_out_norm, scale)
        if not layer.is_parallel and layer.mlp is not None:
            self._norm(layer.mlp_norm)
        factor = layer.factor if layer.input_gate is None else 1.0
        scale = residual_scale * scales.mlp
        if layer.mlp is None:
            pass
        elif isinstance(layer.mlp, MLP):
            self._operations.project_inner(layer.mlp, self._normed, self._mlp)
            self._add("down", self._mlp, layer.mlp.down, layer.mlp_out_norm, scale, factor)
        else:
            self._experts.add(layer.mlp, layer.mlp_out_norm, scale, factor)
        if layer.input_gate is not None:
            self._input_gate(index, layer.input_gate, layer.factor)

    def _input_gate(self, index: int, gate: InputGate, factor: float) -> None:
        """Add the operations of a layer's own inputs, which are added to the hidden state."""
        operations = self._operations
        self._norm(None)
        site = operations.site(self._normed, [gate.gate])
        weights = operations.weights.pack([gate.gate])
        x = operations.input_of(self._normed, weights)
        factors = (self._layer_inputs, index * len(gate.gate.weight))
        operations.add("layer inputs", "activate", x, self._gated, weights, site, gate.activation, *factors)
        self._add("layer inputs", self._gated, gate.projection, gate.norm, 1.0, factor)

    def _norm(self, norm: Norm | None) -> None:
        """Add the operation that norms the hidden state for the matrices. Without a norm, it only converts it."""
        operations = self._operations
        normalize = Normalize.of(norm, self._width)
        operations.add("norm", "norm", self._hidden, self._normed, normalize, False)

    def _attention(self, index: int, attention: Attention) -> None:
        operations = self._operations
        heads = attention.heads
        cache = self._cache(index, attention)
        if isinstance(attention.qkv, LatentProjection):
            self._latent_attention(attention, attention.qkv, cache)
            return
        gates = [] if attention.gate is None else [attention.gate]
        operations.project("qkv", self._normed, self._qkv, [*attention.qkv, *gates])
        own = (attention.query_norm, attention.key_norm, attention.value_norm)
        norms = [Normalize.of(norm) for norm in own]
        if attention.cache_of is not None:
            parts = 1
        elif attention.values_of_keys:
            parts = 2
        else:
            parts = 3
        arguments = (self._qkv, self._queries, cache, heads, self._rotary(attention), *norms, parts)
        operations.add("rotary", "prepare", *arguments)
        self._attend(attention, self._attended, cache)
        if attention.gate is not None:
            first = _qkv_width(attention) - len(attention.gate.weight)
            width = len(attention.gate.weight)
            operations.add("attention", "gate_rows", self._attended, self._qkv, first, width)

    def _latent_attention(self, attention: Attention, qkv: LatentProjection, cache: int) -> None:
        """Add the operations of attention over latent vectors, as src/latent.h computes it."""
        operations = self._operations
        heads = attention.heads
        shape = attention.shape
        own = attention.rotary_offset
        rank = len(qkv.norm.weight)
        if not latent_dim(rank, shape.key_dim - own, shape):
            raise NotKnown("its latent vectors have sizes that are no multiples of 16, or that are too large")
        x = self._normed
        if qkv.query_down is not None:
            operations.project("qkv", x, self._latent, [qkv.query_down])
            normalize = Normalize.of(qkv.query_norm, len(qkv.query_down.weight))
            operations.add("norm", "norm", self._latent, self._normed_latent, normalize, False)
            x = self._normed_latent
        operations.project("qkv", x, self._qkv, [qkv.query])
        operations.project("qkv", self._normed, self._latent, [qkv.down])
        operations.add("norm", "norm", self._latent, self._normed_latent, Normalize.of(qkv.norm), False)
        buffers = (self._qkv, self._latent, self._normed_latent, self._own, self._queries)
        rotary = replace(self._rotary(attention), offset=0)
        operations.add("rotary", "prepare_latent", *buffers, cache, heads, own, rotary)
        keys, values = (
            operations.weights.expanded(qkv.up.weight).unflatten(0, (heads, -1)).split([own, shape.value_dim], dim=1)
        )
        site = operations.site(self._own, HeadRows(qkv.up, heads, 0, own, is_transposed=True), heads, own)
        weights = self._weights_of_heads(keys.mT)
        sizes = (heads, rank, own, shape.latent_dim)
        operations.add("qkv", "project_heads", self._own, self._queries, weights, site, *sizes)
        latent = self._attended_latent
        self._attend(attention, latent, cache)
        rows = HeadRows(qkv.up, heads, own, shape.value_dim, is_transposed=False)
        site = operations.site(latent, rows, heads, rank)
        weights = self._weights_of_heads(values)
        sizes = (heads, shape.value_dim, rank, shape.value_dim)
        operations.add("output", "project_heads", latent, self._attended, weights, site, *sizes)

    def _weights_of_heads(self, weight: Tensor) -> int:
        """Pack the matrices [heads, n, k] of all heads, so that the rows of each head begin with a new panel."""
        operations = self._operations
        missing = -weight.shape[1] % PANEL
        return operations.weights.pack(
            [Matrix(torch.nn.functional.pad(weight, (0, 0, 0, missing)).flatten(0, 1), None)]
        )

    def _attend(self, attention: Attention, out: int, cache: int) -> None:
        operations = self._operations
        heads = attention.heads
        parameters = attention.parameters
        window = parameters.sliding_window or 0
        sinks = operations.keep(attention.sinks)
        options = AttentionOptions(
            heads, parameters.scaling, window, parameters.softcap or 0.0, sinks, parameters.looks_ahead
        )
        plan = self._library.add_plan(operations.handle, heads, cache, window, parameters.looks_ahead)
        operations.add("attention", "attend", self._queries, out, cache, plan, options)

    def _rotary(self, attention: Attention) -> Rotary:
        table = attention.rotary
        offset = attention.rotary_offset
        factors = attention.query_factors
        if table is None:
            return Rotary(None, None, offset, 0, 0, False, False, factors)
        sizes = (offset, table.cosines.shape[1], table.apart)
        how = (table.is_interleaved, attention.rotates_before_norms)
        return Rotary(table.cosines, table.sines, *sizes, *how, factors, table.axes)

    def _cache(self, index: int, attention: Attention) -> int:
        """Return the index of the cache that a layer reads. If it is the layer's own, it is created here."""
        if attention.cache_of is not None:
            return self._cache_indices[attention.cache_of]
        shape = attention.shape
        size = self._block_size
        cache = new_cache(shape, self._library.dtype, num_blocks=self._num_blocks, block_size=size)
        self.caches.append(cache)
        if isinstance(attention.qkv, LatentProjection):
            rank = len(attention.qkv.norm.weight)
            memory = CacheMemory(cache.keys.data_ptr(), None, 1, shape.latent_dim, rank, size, False)
        else:
            pointers = (cache.keys.data_ptr(), cache.values.data_ptr())
            sizes = self._operations.keep(attention.key_sizes)
            memory = CacheMemory(*pointers, shape.kv_heads, shape.key_dim, shape.value_dim, size, shape.is_int8, sizes)
        self._cache_indices[index] = self._library.add_cache(self._operations.handle, memory)
        return self._cache_indices[index]

    def _add(self, name: str, x: int, matrix: Matrix, norm: Norm | None, scale: float, factor: float = 1.0) -> None:
        """Add the product with `matrix`, normed, to the hidden state. With a norm, the sum is scaled by `factor`."""
        operations = self._operations
        if norm is None:
            operations.project(name, x, self._hidden, [matrix], adds=True, scale=scale)
        else:
            operations.project(name, x, self._branch, [matrix])
            operations.add_norm(self._branch, self._hidden, norm, scale, factor)


def _qkv_width(attention: Attention) -> int:
    """Return the width of a token's queries, keys, values and gates. In latent attention, there are only queries."""
    if isinstance(attention.qkv, LatentProjection):
        return attention.heads * attention.shape.key_dim
    gates = 0 if attention.gate is None else len(attention.gate.weight)
    return sum(len(matrix.weight) for matrix in attention.qkv) + gates
