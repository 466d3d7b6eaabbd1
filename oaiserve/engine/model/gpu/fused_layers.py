"""The executor that runs a decoder by its description, on a GPU: few launches for each layer, and nothing to compile.

A layer of a decode is four matrix products, one kernel for attention with norms and rotation of queries and keys and
the write into the cache, two for sums with the norms behind, and one for the activation. The description is
that of a CPU's native step. Matrix products are those of the model's modules, with weights of any format.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import embedding, linear
from transformers.pytorch_utils import Conv1D

from oaiserve.engine.decoder.description import MLP, Attention, Decoder, Layer, Matrix, Norm, NotKnown
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.attention import Backend, LayerCache, Scoring, StepAttention
from oaiserve.engine.model.attention.rotation import Rotation
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.joined_product import Multiply, Product, joined_product
from oaiserve.engine.model.kv_cache import copy_blocks
from oaiserve.engine.model.loaded import LoadedModel, base_of


class FusedLayers:
    """The layers of a model, ready to run, by `operations`: the module `layer_operations` or `triton_layers`.

    With an `exact` product, this computes all products. Raises NotKnown for a component without an operation here.
    """

    def __init__(
        self, loaded: LoadedModel, decoder: Decoder, operations: ModuleType, exact: Multiply | None = None
    ) -> None:
        if not isinstance(decoder.embedding, Tensor):
            raise NotKnown("its embedding is in blocks")
        if decoder.layer_inputs is not None:
            raise NotKnown("it has a norm behind its embedding, or embeddings of layers")
        self._operations = operations
        self._decoder = decoder
        self._embedding = decoder.embedding
        self.is_exact = exact is not None
        self._head = _module_product(loaded.model.get_output_embeddings(), exact)
        self._layers = [
            _FusedLayer(loaded, index, layer, operations, exact) for index, layer in enumerate(decoder.layers)
        ]
        # The sum at the end of a layer is followed by the first norm of the next one.
        self._next_norms = [*(layer.attention_norm for layer in decoder.layers[1:]), decoder.final_norm]

    def __call__(self, batch: Batch, attention: StepAttention, caches: dict[int, LayerCache]) -> Tensor:
        """Return the logits [R, vocab] of `batch.logits_rows`."""
        operations, scale = self._operations, self._decoder.residual_scale
        hidden = self._embedded(batch)
        hidden, x = operations.add_and_norm(hidden, (), None, self._decoder.layers[0].attention_norm)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            attended, norms = layer.attend(x, batch, attention, caches[index]), layer.described
            if norms.is_parallel:
                if norms.mlp_norm is not norms.attention_norm:
                    x = operations.add_and_norm(hidden, (), None, norms.mlp_norm)[1]
                added: tuple[Tensor, ...] = attended, layer.mlp(x)
            else:
                hidden, x = operations.add_and_norm(
                    hidden, (attended,), norms.attention_out_norm, norms.mlp_norm, scale
                )
                added = (layer.mlp(x),)
            hidden, x = operations.add_and_norm(hidden, added, norms.mlp_out_norm, next_norm, scale)
            if batch.media is not None and index < len(batch.media.deep):
                hidden = hidden.index_add(0, batch.media.rows, batch.media.deep[index].to(hidden.dtype))
                hidden, x = operations.add_and_norm(hidden, (), None, next_norm)
        logits = self._head(x.index_select(0, batch.logits_rows))
        if self._decoder.logits_scale != 1.0:
            logits = logits * self._decoder.logits_scale
        if (softcap := self._decoder.logits_softcap) != 0.0:
            logits = (logits / softcap).tanh() * softcap
        return logits

    def _embedded(self, batch: Batch) -> Tensor:
        ids, media = batch.input_ids, batch.media
        if media is not None:  # the ids of images may be outside of the vocabulary
            ids = ids.index_fill(0, media.rows, self._decoder.padding_id)
        hidden = embedding(ids, self._embedding)
        if self._decoder.embedding_scale != 1.0:
            # Transformers' code rounds the factor to the dtype of the model.
            hidden = hidden * torch.tensor(self._decoder.embedding_scale, dtype=hidden.dtype).item()
        if media is not None:
            hidden = hidden.index_copy(0, media.rows, media.vectors.to(hidden.dtype) * self._decoder.vector_scale)
        if self._decoder.position_embedding is not None:
            hidden = hidden + embedding(batch.positions, self._decoder.position_embedding)
        return hidden


class _FusedLayer:
    """A layer of the description, with its products. Raises NotKnown for one that is not computed here."""

    def __init__(
        self, loaded: LoadedModel, index: int, layer: Layer, operations: ModuleType, exact: Multiply | None
    ) -> None:
        attention, mlp = layer.attention, layer.mlp
        if attention is None or layer.mixer is not None or attention.gate is not None:
            raise NotKnown("it has layers that keep a state, or gates of attention")
        if not isinstance(attention.qkv, list):
            raise NotKnown("its keys and values are made from latent vectors")
        if attention.cache_of is not None or attention.values_of_keys or attention.value_norm is not None:
            raise NotKnown("it has layers without keys or values of their own, or norms of values")
        table = attention.rotary
        if table is not None and not table.is_interleaved and table.apart != table.cosines.shape[1]:
            raise NotKnown("it rotates pairs that are further apart")
        if attention.query_factors is not None:
            raise NotKnown("it scales queries by their positions")
        if layer.input_gate is not None or layer.factor != 1.0:
            raise NotKnown("its layers have inputs or factors of their own")
        self.described, self._attention, own = layer, attention, attention.parameters
        self._qkv, self._out = _product(loaded, attention.qkv, exact), _product(loaded, [attention.out], exact)
        if isinstance(mlp, MLP):
            self.mlp = _fused_mlp(loaded, mlp, operations, exact)
        elif exact is None:
            self.mlp = _mixture(loaded, index)
        else:
            raise NotKnown("it has experts, whose products round by the number of rows")
        self._scoring = Scoring(own.scaling, own.sliding_window, own.softcap, attention.sinks, own.looks_ahead)
        # Queries and keys are normed by head, as attention does it.
        self._norms_heads = not attention.rotates_before_norms and all(
            _is_of_heads(norm, attention) for norm in (attention.query_norm, attention.key_norm)
        )

    def attend(self, x: Tensor, batch: Batch, attention: StepAttention, cache: LayerCache) -> Tensor:
        """Return the attention's addition to the hidden state."""
        described, shape = self._attention, self._attention.shape
        sizes = (described.heads * shape.key_dim, shape.kv_heads * shape.key_dim, shape.kv_heads * shape.value_dim)
        parts = self._qkv(x).split(sizes, dim=-1)
        numbers = (described.heads, shape.kv_heads, shape.kv_heads)
        query, key, value = (part.unflatten(1, (number, -1)) for part, number in zip(parts, numbers, strict=True))
        has_norms = described.query_norm is not None or described.key_norm is not None
        if has_norms and not self._norms_heads and not described.rotates_before_norms:
            query, key = self._normed(query, key)
        table, more = described.rotary, {}
        if table is not None or self._norms_heads:
            positions, cosines, sines = batch.positions, None, None
            if table is not None:
                cosines, sines = table.cosines, table.sines
                if batch.axes is not None and table.axes is not None:  # each token has angles of its own
                    places = batch.axes.index_select(0, table.axes).T
                    cosines, sines = cosines.gather(0, places), sines.gather(0, places)
                    positions = torch.arange(len(positions), device=positions.device)
            apart = 0 if table is None else (1 if table.is_interleaved else table.apart)
            rotation = Rotation(positions, cosines, sines, apart)
            if self._norms_heads and described.query_norm is not None and described.key_norm is not None:
                rotation = rotation._replace(
                    query_norm=described.query_norm.weight,
                    key_norm=described.key_norm.weight,
                    epsilon=described.query_norm.epsilon,
                )
            if getattr(attention, "rotates", False) and not described.rotates_before_norms:
                more = {"rotation": rotation}
            else:
                query, key = rotation(query, key)
        if has_norms and described.rotates_before_norms:
            query, key = self._normed(query, key)
        return self._out(attention(query, key, value, cache, self._scoring, **more).flatten(1))

    def _normed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Norm heads separately, or all heads together, whichever the norm is as wide as."""
        found = []
        for heads, norm in ((query, self._attention.query_norm), (key, self._attention.key_norm)):
            if norm is not None:
                rows = heads if len(norm.weight) == heads.shape[2] else heads.flatten(1)
                heads = norm(rows.float()).to(heads.dtype).view(heads.shape)
            found.append(heads)
        return found[0], found[1]


def _fused_mlp(loaded: LoadedModel, mlp: MLP, operations: ModuleType, exact: Multiply | None) -> Product:
    together = _product(loaded, [mlp.up] if mlp.gate is None else [mlp.gate, mlp.up], exact)
    down, is_gated = _product(loaded, [mlp.down], exact), mlp.gate is not None
    return lambda x: down(operations.activate(together(x), mlp.activation, is_gated=is_gated))


def _mixture(loaded: LoadedModel, index: int) -> Product:
    """Return a mixture of experts as transformers' code computes it: its router, and experts that may be packed."""
    layer = base_of(loaded.model).layers[index]
    if any(getattr(layer, name, None) is not None for name in ("shared_mlp", "experts")):
        raise NotKnown("it has experts beside an MLP")
    module = next(getattr(layer, name) for name in ("mlp", "block_sparse_moe", "feed_forward") if hasattr(layer, name))

    def compute(x: Tensor) -> Tensor:
        out = module(x[None])
        output: Tensor = out[0] if isinstance(out, tuple) else out  # some return their router's result, too
        return output.view(x.shape)

    return compute


def _is_of_heads(norm: Norm | None, attention: Attention) -> bool:
    """Return whether a norm is one of each head, which attention computes."""
    query_norm = attention.query_norm
    if norm is None or query_norm is None or norm.epsilon != query_norm.epsilon:
        return False
    return norm.bias is None and not norm.subtracts_mean and len(norm.weight) == attention.shape.key_dim


def _module_product(module: Any, exact: Multiply | None) -> Product:
    """Return the product of a linear layer: of its module, or an exact one. Raises NotKnown for packed weights."""
    if exact is None:
        return module  # type: ignore[no-any-return]
    if type(module) not in (Linear, Conv1D):
        raise NotKnown("its weights stay packed, and products with these round by the number of rows")
    weight = module.weight.t() if type(module) is Conv1D else module.weight
    return lambda x: exact(x, weight, module.bias)


def _product(loaded: LoadedModel, matrices: list[Matrix], exact: Multiply | None) -> Product:
    """Return the product with all rows of these matrices: a single one if they are of one module, or can be joined."""
    modules = [loaded.model.get_submodule(matrix.module) for matrix in matrices]
    if all(module is modules[0] for module in modules):
        first = matrices[0]
        if not first.heads:
            return _module_product(modules[0], exact)
        weights = [matrix.weight for matrix in matrices if isinstance(matrix.weight, Tensor)]
        if len(weights) < len(matrices):
            raise NotKnown("its weights are in blocks")
        weight, bias = weights[0] if len(weights) == 1 else torch.cat(weights), first.bias
        return lambda x: (exact or linear)(x, weight, bias)
    parts = [_module_product(module, exact) for module in modules]
    return joined_product(modules, exact or linear) or (lambda x: torch.cat([part(x) for part in parts], dim=-1))


class FusedExecutor:
    """Runs a decoder by its description. `backend` computes attention, and reads and writes `caches`, by layer."""

    def __init__(self, layers: FusedLayers, caches: dict[int, LayerCache], backend: Backend) -> None:
        self.is_exact = layers.is_exact  # others have products that round by the number of rows
        self._layers = layers
        self._caches = caches
        self._backend = backend

    def forward(self, batch: Batch) -> Tensor:
        return self._layers(batch, self._backend(batch), self._caches)

    def prepare(self, adapter: Adapter) -> Adapter:
        """Raise NotImplementedError: fused layers have no place for an adapter."""
        raise NotImplementedError

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        copy_blocks(self._caches.values(), copies)
