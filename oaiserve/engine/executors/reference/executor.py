"""The reference executor: computes the steps of a described decoder, operation by operation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import MLP, Decoder, InputGate, Layer, LayerInputs, Norm, Scales, matrices_in
from oaiserve.engine.executors.reference.attention import PagedAttention
from oaiserve.engine.executors.reference.experts import mixture_output, mlp_output
from oaiserve.engine.executors.reference.heads import Attending
from oaiserve.engine.executors.reference.hidden_states import corrected, first_states, last_state, predicted
from oaiserve.engine.executors.reference.mixers import mixer_output
from oaiserve.engine.executors.reference.place import new_cache, placed
from oaiserve.engine.executors.reference.products import Products, product
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.kv_cache import block_tensors, copy_blocks
from oaiserve.engine.model.layer_operations import ACTIVATIONS


class ReferenceExecutor:
    """Runs one decoder in plain torch, and owns its KV cache.

    Weights, products and the cache are in `dtype`; hidden states, norms, attention and recurrences are in float32.
    """

    is_exact = False  # matrix products round differently for different numbers of rows

    def __init__(
        self, decoder: Decoder, *, dtype: torch.dtype, device: torch.device, num_blocks: int, block_size: int
    ) -> None:
        """Copy the tensors that are not on the device in this dtype yet.

        Raises NotKnown for a cache of integers.
        """
        self.caches = {
            index: new_cache(layer.attention.shape, dtype, device, num_blocks=num_blocks, block_size=block_size)
            for index, layer in enumerate(decoder.layers)
            if layer.attention is not None and layer.attention.cache_of is None
        }
        self._decoder = placed(decoder, dtype, device)
        weights = {id(matrix.weight): matrix.weight for matrix in matrices_in(self._decoder)}
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits float32 [R, vocab] of `batch.logits_rows`."""
        return deque(self.steps(batch), maxlen=1).pop()  # The deque drops every other hidden state.

    def steps(self, batch: Batch) -> Iterator[Tensor]:
        """Yield the hidden state float32 [T, width] of all tokens, before the first layer and after each one, and then
        the logits float32 [R, vocab] of `batch.logits_rows`."""
        products = Products(batch)
        attend = Attending(batch, products, PagedAttention(batch))
        return _Forward(self._decoder, self.caches, batch, products, attend).steps()

    def prepare(self, adapter: Adapter) -> Adapter:
        return adapter  # The executor uses adapters as they are.

    @property
    def block_tensors(self) -> list[Tensor]:
        return block_tensors(self.caches.values())

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if self.caches:  # Without caches, no layer has attention.
            copy_blocks(self.caches.values(), copies)


class _Forward(NamedTuple):
    decoder: Decoder
    caches: dict[int, LayerCache]
    batch: Batch
    products: Products
    attend: Attending

    def steps(self) -> Iterator[Tensor]:
        decoder = self.decoder
        media = self.batch.media
        ids = self.batch.input_ids
        if media is not None:  # The ids of images may be outside the vocabulary.
            ids = ids.index_fill(0, media.rows, decoder.padding_id)
        hidden = _embedded(ids, decoder.embedding) * decoder.embedding_scale
        if decoder.position_embedding is not None:
            hidden = hidden + decoder.position_embedding[self.batch.positions].float()
        if media is not None:
            hidden[media.rows] = media.vectors.float() * decoder.vector_scale
        yield hidden
        if decoder.layer_inputs is None:
            inputs = None
        else:
            inputs = self._layer_inputs(decoder.layer_inputs, ids, hidden)
        states = decoder.hidden_states
        if states is not None:
            hidden = first_states(states, hidden, self.products)
        for index, layer in enumerate(decoder.layers):
            if states is not None:
                assert inputs is not None
                hidden = self._layer_of_states(index, layer, hidden, states.active, inputs[:, index])
                yield hidden[0]
                continue
            hidden = self._layer(index, layer, hidden)
            if layer.input_gate is not None:
                assert inputs is not None
                hidden = hidden + self._gated_inputs(layer.input_gate, inputs[:, index], hidden)
            hidden = hidden * layer.factor
            if media is not None and index < min(decoder.num_deep, len(media.deep)):
                hidden = hidden.index_add(0, media.rows, media.deep[index].float())
            yield hidden
        if states is not None:
            hidden = last_state(states, hidden, self.products)
        last = decoder.final_norm(hidden[self.batch.logits_rows])
        logits = product(last, decoder.head) * decoder.logits_scale
        if decoder.logits_softcap:
            logits = (logits / decoder.logits_softcap).tanh() * decoder.logits_softcap
        yield logits

    def _layer_inputs(self, inputs: LayerInputs, ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the inputs float32 [T, layers, inputs of a layer] of all layers."""
        sizes = (len(self.decoder.layers), -1)
        projected = inputs.norm(self.products(hidden, inputs.projection).unflatten(1, sizes))
        of_tokens: Tensor = _embedded(ids, inputs.table).unflatten(1, sizes)
        return (projected + of_tokens * inputs.table_scale) * inputs.scale

    def _gated_inputs(self, gate: InputGate, inputs: Tensor, hidden: Tensor) -> Tensor:
        gates = ACTIVATIONS[gate.activation](self.products(hidden, gate.gate))
        added = self.products(inputs * gates, gate.projection)
        return gate.norm(added)

    def _layer_of_states(self, index: int, layer: Layer, hidden: Tensor, active: int, inputs: Tensor) -> Tensor:
        """Return the hidden states float32 [states, T, width] after a layer, given those before it and its inputs."""
        altup = layer.altup
        gate = layer.input_gate
        assert altup is not None
        assert gate is not None
        hidden = predicted(altup, hidden, active, self.products)
        output = self._layer(index, layer, hidden[active])
        hidden = corrected(altup, hidden, output, active, self.products)
        if altup.scale is None:
            read = hidden[active]
        else:
            read = hidden[active] * altup.scale
        hidden[1:] += self._gated_inputs(gate, inputs, read)
        return hidden

    def _layer(self, index: int, layer: Layer, hidden: Tensor) -> Tensor:
        """Return the hidden state float32 [T, width] after a layer has added its outputs."""
        scale = self.decoder.residual_scale
        scales = layer.scales or Scales()
        x = _normed(hidden, layer.attention_norm)
        before = hidden
        if layer.mixer is not None:
            assert self.batch.states is not None
            mixed = mixer_output(layer.mixer, x, self.products, self.batch.states, index)
            hidden = hidden + scale * scales.mixer * _normed(mixed, layer.attention_out_norm)
        if (attention := layer.attention) is not None:
            cache = self.caches[index if attention.cache_of is None else attention.cache_of]
            attended = self.attend(attention, x, cache)
            hidden = hidden + scale * scales.attention * _normed(attended, layer.attention_out_norm)
        if (laurel := layer.laurel) is not None:
            low = self.products(x, laurel.product.down)
            hidden = (hidden + x + laurel.norm(self.products(low, laurel.product.up))) * 2**-0.5
        if layer.mlp is None:
            return hidden
        read = before if layer.is_parallel else hidden
        x = _normed(read, layer.mlp_norm)
        if isinstance(layer.mlp, MLP):
            out = mlp_output(layer.mlp, x, self.products)
        else:
            out = mixture_output(layer.mlp, x, read, self.products)
        return hidden + scale * scales.mlp * _normed(out, layer.mlp_out_norm)


def _embedded(ids: Tensor, table: Tensor | Blocks) -> Tensor:
    """Return the rows float32 [T, width] of a table. Ids beyond its last row use the first one."""
    assert isinstance(table, Tensor)
    return table[ids.where(ids < len(table), 0)].float()


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return norm(x)
