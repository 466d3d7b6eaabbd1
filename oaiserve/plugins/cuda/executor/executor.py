"""Runs a description on a GPU, with joined products, kernels and an attention backend.

In a decode, a layer takes four products, one kernel for attention with norms and rotation, two kernels for sums with
the norms after them, and one for the activation. Parts without a kernel are computed as in the reference. The host
reads nothing from the device, so that decodes can be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding

from oaiserve.engine.decoder.description import (
    MLP,
    Decoder,
    DeltaNet,
    InputGate,
    Layer,
    LayerInputs,
    Norm,
    NotKnown,
    Scales,
    by_kind,
    matrices_in,
)
from oaiserve.engine.decoder.reference_only import refuse_reference_only
from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.executors.reference.place import new_cache
from oaiserve.engine.model.adapters import Adapter, AdapterPart
from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.kv_cache import block_tensors, copy_blocks
from oaiserve.plugins.cuda.executor.attention import (
    AbsorbedLayer,
    AttentionLayer,
    CudaStep,
    LatentLayer,
    attention_layer,
)
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.mlp import MixerLayer, MixtureLayer, MLPLayer
from oaiserve.plugins.cuda.executor.place import PLACED, JoiningPlacing


class Addition(NamedTuple):
    """What a layer adds to the hidden state: scale * norm(the sum of `parts`)."""

    parts: tuple[Tensor, ...]  # [T, width] each
    norm: Norm | None
    scale: float


class CudaExecutor:
    """Runs one decoder with hidden states, weights and KV cache in the dtype of the weights."""

    is_exact = False  # matrix products round differently for different numbers of rows

    def __init__(
        self,
        weights: CudaWeights,
        kv_shapes: Mapping[int, KVShape],
        *,
        num_blocks: int,
        block_size: int,
        kernels: Kernels,
    ) -> None:
        """Create a KV cache with these shapes, keyed by layer. Raises NotKnown for a cache of integers."""
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        self.caches: dict[int, LayerCache] = {
            layer: new_cache(shape, weights.dtype, weights.device, **sizes) for layer, shape in kv_shapes.items()
        }
        self.kernels = kernels
        self.weight_bytes = weights.num_bytes
        self._weights = weights

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits [R, vocab] of `batch.logits_rows`, in the model's dtype."""
        adapters = batch.captured_adapters
        if adapters is None and self.kernels.adapters is not None and any(batch.adapters):
            adapters = self.kernels.adapters.of_batch(batch)
        own = self._weights
        return own(CudaStep(batch, own.dtype, self.kernels, adapters, own.rounded_columns), self.caches)

    def prepare(self, adapter: Adapter) -> Adapter:
        """Return an adapter whose rows are in the order of the description."""
        parts = dict(adapter.parts)
        for module, (heads, of_head) in self._weights.sorted_by_head.items():
            if (part := parts.get(module)) is not None:
                parts[module] = AdapterPart(part.a, by_kind(part.b, heads, of_head), part.scale)
        return Adapter(adapter.name, parts)

    @property
    def block_tensors(self) -> list[Tensor]:
        return block_tensors(self.caches.values())

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if self.caches:  # Without caches, no layer has attention.
            copy_blocks(self.caches.values(), copies)


class CudaWeights:
    """The embedding, the layers and the head of a decoder on a device, with weights in `dtype` or in blocks."""

    def __init__(self, decoder: Decoder, *, dtype: torch.dtype, device: torch.device, in_float8: bool = False) -> None:
        """Copy the weights one by one. Afterwards, the description is no longer needed.

        With `in_float8`, matrices of layers are stored in 8-bit floats. Raises NotKnown for parts without kernels.
        """
        refuse_without_kernels(decoder)
        self.dtype = dtype
        self.device = device
        placing = JoiningPlacing(dtype, device, in_float8=in_float8)
        self._embedding, self._head = placing.embedding_and_head(decoder.embedding, decoder.head)
        self._vocab_size = len(decoder.head.weight)
        self._has_longer_vocabulary = len(decoder.head.weight) > len(decoder.embedding)
        self._decoder: Decoder = placing.part(replace(decoder, embedding=torch.empty(0), layers=[], head=PLACED))
        # One norm precedes each layer, and one precedes the head.
        norms = [*(layer.attention_norm for layer in decoder.layers), decoder.final_norm]
        self._norms: list[Norm | None] = placing.part(norms)
        self._layers = [
            _CudaLayer(index, layer, decoder.residual_scale, placing) for index, layer in enumerate(decoder.layers)
        ]
        self.num_bytes = placing.weight_bytes
        self.packed: list[PackedMatrix] = placing.packed  # matrices in blocks, and experts' matrices in any form
        self.widest = placing.widest  # the maximum of rows and columns of all layers' matrices
        unpacked = [matrix for matrix in self.packed if not isinstance(matrix, ExpertMatrices)]
        groups = {matrix.rounded_columns for matrix in unpacked if matrix.is_for_torch}
        self.rounded_columns = next(iter(groups)) if len(groups) == 1 else None  # None: products round their own inputs
        self.largest_packed = max((math.prod(matrix.shape) for matrix in unpacked), default=0)
        self.sorted_by_head = {
            matrix.module: (matrix.heads, matrix.parts) for matrix in matrices_in(decoder) if matrix.heads
        }

    def __call__(self, step: CudaStep, caches: dict[int, LayerCache]) -> Tensor:
        decoder = self._decoder
        media = step.batch.media
        ids = step.batch.input_ids
        num_deep = 0
        if media is not None:  # The ids of images may be outside the vocabulary.
            ids = ids.index_fill(0, media.rows, decoder.padding_id)
            num_deep = min(decoder.num_deep, len(media.deep))
        hidden = self._embedded(ids, step)
        inputs: Sequence[Tensor | None] = [None] * len(self._layers)
        if decoder.layer_inputs is not None:
            inputs = self._layer_inputs(decoder.layer_inputs, ids, hidden, step)
        # Vectors of images are added between a layer and the next norm.
        norms = [*self._norms[:1], *[None] * num_deep, *self._norms[1 + num_deep :]]
        hidden, x = added(step, hidden, [], norms[0])
        for index, layer in enumerate(self._layers):
            hidden, x = layer(hidden, x, step, caches, inputs[index], norms[index + 1])
            if media is not None and index < num_deep:
                hidden = hidden.index_add(0, media.rows, media.deep[index].to(hidden.dtype))
                hidden, x = added(step, hidden, [], self._norms[index + 1])
        logits = step.products.joined(x.index_select(0, step.batch.logits_rows), self._head)
        if decoder.logits_scale != 1.0:
            logits = logits * decoder.logits_scale
        if decoder.logits_softcap:
            logits = (logits / decoder.logits_softcap).tanh() * decoder.logits_softcap
        return logits[:, : self._vocab_size]

    def _embedded(self, ids: Tensor, step: CudaStep) -> Tensor:
        decoder = self._decoder
        media = step.batch.media
        if self._has_longer_vocabulary:
            hidden = _rows(ids, self._embedding)
        else:
            hidden = embedding(ids, self._embedding)
        if decoder.embedding_scale != 1.0:
            hidden = hidden * decoder.embedding_scale
        if decoder.position_embedding is not None:
            hidden = hidden + embedding(step.batch.positions, decoder.position_embedding)
        if media is not None:
            hidden = hidden.index_copy(0, media.rows, media.vectors.to(hidden.dtype) * decoder.vector_scale)
        return hidden

    def _layer_inputs(self, inputs: LayerInputs, ids: Tensor, hidden: Tensor, step: CudaStep) -> tuple[Tensor, ...]:
        """Return the inputs [T, inputs of a layer] of each layer."""
        assert isinstance(inputs.table, Tensor)
        sizes = (len(self._layers), -1)
        projected = inputs.norm(step.products(hidden, inputs.projection).unflatten(1, sizes))
        of_tokens = _rows(ids, inputs.table).unflatten(1, sizes)
        together: Tensor = (projected + of_tokens * inputs.table_scale) * inputs.scale
        return together.to(hidden.dtype).unbind(1)


def refuse_without_kernels(decoder: Decoder) -> None:
    """Raise NotKnown for a decoder that only other executors can compute."""
    refuse_reference_only(decoder)
    nets = (layer.mixer for layer in decoder.layers if isinstance(layer.mixer, DeltaNet))
    if any(net.decays is not None or net.gates is not None or net.has_sigmoid_gates for net in nets):
        raise NotKnown("its states have a decay for each row, or other gates")


class _CudaLayer:
    """A layer on the device."""

    def __init__(self, index: int, layer: Layer, residual_scale: float, placing: JoiningPlacing) -> None:
        scales = layer.scales or Scales()
        self._mixer_scale = residual_scale * scales.mixer
        self._attention_scale = residual_scale * scales.attention
        self._mlp_scale = residual_scale * scales.mlp
        self._mixer: MixerLayer | None = None
        if layer.mixer is not None:
            self._mixer = MixerLayer(layer.mixer, placing, index)
        self._attention: AttentionLayer | LatentLayer | AbsorbedLayer | None = None
        self._cache_of = index
        if layer.attention is not None:
            self._attention = attention_layer(layer.attention, placing)
            if layer.attention.cache_of is not None:
                self._cache_of = layer.attention.cache_of
        self._mlp: MLPLayer | MixtureLayer | None = None
        if isinstance(layer.mlp, MLP):
            self._mlp = MLPLayer(layer.mlp, placing)
        elif layer.mlp is not None:
            self._mlp = MixtureLayer(layer.mlp, placing)
        self._input_gate: _GatedInputs | None = None
        if layer.input_gate is not None:
            self._input_gate = _GatedInputs(layer.input_gate, placing)
        self._reads_same_norm = layer.mlp_norm is layer.attention_norm
        self._layer: Layer = placing.part(replace(layer, mixer=None, attention=None, mlp=None, input_gate=None))

    def __call__(
        self,
        hidden: Tensor,
        x: Tensor,
        step: CudaStep,
        caches: dict[int, LayerCache],
        inputs: Tensor | None,
        next_norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state [T, width] after the layer, possibly changed in place, and its norm by `next_norm`.

        `x` is the norm of the hidden state before the layer, and `inputs` are the layer's own from LayerInputs.
        """
        layer = self._layer
        additions: list[Addition] = []
        if self._mixer is not None:
            additions.append(Addition((self._mixer(x, step),), layer.attention_out_norm, self._mixer_scale))
        if self._attention is not None:
            attended = self._attention(x, step, caches[self._cache_of])
            additions.append(Addition((attended,), layer.attention_out_norm, self._attention_scale))
        if self._mlp is not None:
            if not layer.is_parallel:
                hidden, x = added(step, hidden, additions, layer.mlp_norm)
                additions = []
            elif not self._reads_same_norm:
                x = added(step, hidden, [], layer.mlp_norm)[1]
            additions.append(Addition(self._mlp(x, hidden, step), layer.mlp_out_norm, self._mlp_scale))
        if self._input_gate is not None:
            assert inputs is not None
            hidden, _ = added(step, hidden, additions, None)
            additions = [self._input_gate(inputs, hidden, step)]
        if layer.factor == 1.0:
            return added(step, hidden, additions, next_norm)
        hidden, _ = added(step, hidden, additions, None)
        return added(step, hidden * layer.factor, [], next_norm)


class _GatedInputs:
    """What a layer's own inputs add to the hidden state."""

    def __init__(self, gate: InputGate, placing: JoiningPlacing) -> None:
        self._gate = placing.joined([gate.gate])
        self._projection = placing.joined([gate.projection])
        self._norm: Norm = placing.part(gate.norm)
        self._activation = gate.activation

    def __call__(self, inputs: Tensor, hidden: Tensor, step: CudaStep) -> Addition:
        rows = step.products.joined(hidden, self._gate)
        gates = step.kernels.operations.activate(rows, self._activation, is_gated=False)
        return Addition((step.products.joined(inputs * gates, self._projection),), self._norm, 1.0)


def added(step: CudaStep, hidden: Tensor, additions: list[Addition], norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Return the hidden state [T, width] with these additions, possibly changed in place, and its norm, if any."""
    operations = step.kernels.operations
    launches: list[Addition] = []
    for parts, out_norm, scale in additions:
        # One launch adds two parts if they have no norm and the same scale.
        if launches and out_norm is None and launches[-1][1:] == (None, scale) and len(launches[-1].parts + parts) <= 2:
            parts = launches.pop().parts + parts
        launches.append(Addition(parts, out_norm, scale))
    if norm is not None and not launches:
        launches.append(Addition((), None, 1.0))
    x = hidden
    for number, (parts, out_norm, scale) in enumerate(launches, 1):
        last_norm = norm if number == len(launches) else None
        rounded = None if last_norm is None else step.new_rounded(hidden.shape[1])
        hidden, x = operations.add_and_norm(hidden, parts, out_norm, last_norm, scale, rounded)
        step.products.keep(x, rounded)
    return hidden, x


def _rows(ids: Tensor, table: Tensor) -> Tensor:
    """Return rows [T, width] of a table. Ids beyond its last row use the first one."""
    return embedding(ids.masked_fill(ids >= len(table), 0), table)
