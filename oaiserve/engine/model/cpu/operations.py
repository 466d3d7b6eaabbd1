"""Tells native code the operations of a decoder, one after the other, from its description."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.engine.model.attention import LayerCache
from oaiserve.engine.model.cpu.blocks import Blocks
from oaiserve.engine.model.cpu.description import (
    MLP,
    Attention,
    ClampedGate,
    Decoder,
    Expert,
    Experts,
    HeadRows,
    InputGate,
    LatentProjection,
    Layer,
    LayerInputs,
    Matrix,
    MixtureNorms,
    Norm,
    NotKnown,
    Router,
)
from oaiserve.engine.model.cpu.kv_layout import LANES, new_cache
from oaiserve.engine.model.cpu.library import (
    ACTIVATIONS,
    MOST_EXPERTS,
    NO_SITE,
    CacheMemory,
    Gating,
    Library,
    Normalize,
    Rotary,
    Routing,
)
from oaiserve.engine.model.cpu.mixer_operations import MixerOperations, matrices_of

PANEL = 32  # rows of a matrix that native code packs together; those of one panel have one format


class Operations:
    """The operations of a decoder in native code, with the weights, buffers and caches that they refer to.

    Buffers, weights and operations are referred to by their indices, as src/decoder.cpp says.
    """

    def __init__(
        self,
        library: Library,
        handle: int,
        pool: int,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        has_adapters: bool,
    ) -> None:
        """Add all operations of `decoder` to the one of this `handle`. Weights are packed by the threads of `pool`.

        Raises NotKnown for sizes that the native code does not support, and MemoryError.
        """
        self.names: list[str] = []  # the kind of each operation, in order
        self.caches: list[LayerCache] = []
        # Where adapters add: the matrices of each site, whose columns follow each other.
        self.sites: list[list[Matrix] | HeadRows] = []
        self.library, self._handle, self._pool = library, handle, pool
        self._num_blocks, self._block_size = num_blocks, block_size
        self._has_adapters = has_adapters
        self._kept: list[Tensor] = []  # tensors that native code has pointers to
        self._cache_indices: dict[int, int] = {}  # of layers with a cache of their own
        self._widths: dict[int, int] = {}  # of the input of weights that are in blocks, by their index
        self._orders: dict[int, int] = {}  # of their columns, where it is not that of the input: an array that is kept
        self._block_indices: dict[int, int] = {}  # the index of such weights, by the id() of the matrix
        self._groups = self._expert_groups = -1  # the buffers of what these read, and of what those of experts do
        self._assignments: dict[tuple[int, int], int] = {}  # of tokens to experts, by number of experts and top_k
        self._add_decoder(decoder)

    def _add_decoder(self, decoder: Decoder) -> None:
        add = self.library
        width = self._width = decoder.embedding.shape[1]
        attention = [layer.attention for layer in decoder.layers if layer.attention is not None]
        self._hidden = self.floats(width)
        self._branch = self.floats(width)
        self._normed = self.elements(width)
        if attention:
            self._qkv = self.floats(max(_qkv_width(layer) for layer in attention))
            self._queries = self.elements(
                max(layer.heads * (layer.shape.latent_dim or layer.shape.key_dim) for layer in attention)
            )
        mixers = [layer.mixer for layer in decoder.layers if layer.mixer is not None]
        self._attended = self.elements(
            max([*(layer.out.weight.shape[1] for layer in attention), *(mixer.out.weight.shape[1] for mixer in mixers)])
        )
        self._mixers = MixerOperations(self, mixers)
        mlps = [layer.mlp.shared if isinstance(layer.mlp, Experts) else layer.mlp for layer in decoder.layers]
        self._mlp = self.elements(max((len(mlp.up.weight) for mlp in mlps if mlp is not None), default=LANES))
        if mixtures := [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Experts)]:
            rows_each = max(mixture.router.top_k for mixture in mixtures)
            inner = max(len(mixture.experts[0].up.weight) for mixture in mixtures)
            self._scores = self.floats(_up(max(len(mixture.experts) for mixture in mixtures)))
            self._expert_rows = self.elements(width, rows_each)
            self._expert_inner = self.elements(inner, rows_each)
            self._expert_out = self.floats(width, rows_each)
            if any(mixture.norms is not None for mixture in mixtures):
                self._both = self.floats(width)
        if latent := [layer.qkv for layer in attention if isinstance(layer.qkv, LatentProjection)]:
            downs = [matrix for qkv in latent for matrix in (qkv.query_down, qkv.down) if matrix is not None]
            self._latent = self.floats(_up(max(len(matrix.weight) for matrix in downs)))
            self._normed_latent = self.elements(_up(max(len(matrix.weight) for matrix in downs)))
            self._own = self.elements(max(layer.heads * layer.rotary_offset for layer in attention))
            self._attended_latent = self.elements(max(layer.heads * layer.shape.latent_dim for layer in attention))
        matrices = [matrix.weight for layer in decoder.layers for matrix in _matrices(layer)]
        if decoder.layer_inputs is not None:
            matrices.append(decoder.layer_inputs.projection.weight)
            self._layer_inputs = self.floats(len(decoder.layer_inputs.projection.weight))
            self._gated = self.elements(len(decoder.layer_inputs.norm.weight))
        inputs = [m.shape[1] for m in (*matrices, decoder.head.weight, decoder.embedding) if isinstance(m, Blocks)]
        if inputs:
            self._groups = add.add_groups(self._handle, max(inputs), 1)
            if mixtures:
                self._expert_groups = add.add_groups(self._handle, max(width, inner), rows_each)
        self._embed(decoder)
        if decoder.embedding_norm is not None:
            normalize = self.normalize(decoder.embedding_norm)
            self.operation("embed", add.norm_floats, self._hidden, self._hidden, normalize)
        if decoder.layer_inputs is not None:
            self._inputs_of_layers(decoder.layer_inputs, len(decoder.layers))
        for index, layer in enumerate(decoder.layers):
            self._layer(index, layer, decoder.residual_scale)
        last = self.elements(width)
        self.operation("norm", add.norm, self._hidden, last, self.normalize(decoder.final_norm), True)
        head = self._weights([decoder.head])
        x = self._input(last, head, of_logits_rows=True)
        self.operation("logits", add.logits, x, head, decoder.logits_scale, decoder.logits_softcap)

    def _embed(self, decoder: Decoder) -> None:
        add, table, position = self.library, decoder.embedding, decoder.position_embedding
        if isinstance(table, Blocks):
            if position is not None:
                raise NotKnown("it has an embedding of positions beside one in blocks")
            weights = self._block_weights(table, [table], None)
            self.operation("embed", add.embed_blocks, self._hidden, weights, decoder.embedding_scale)
            return
        positions = None if position is None else self.keep(position)
        arguments = (self._hidden, self.keep(table), positions, self._width, decoder.embedding_scale)
        self.operation("embed", add.embed, *arguments)

    def _input(self, x: int, weights: int, *, of_logits_rows: bool = False) -> int:
        """Return what a product with these weights reads: x, or x in eight bits, for which it adds an operation."""
        if weights not in self._widths:
            return x
        arguments = (x, self._groups, self._widths[weights], of_logits_rows, self._orders.get(weights))
        self.operation("quantize", self.library.quantize, *arguments)
        return self._groups

    def _inputs_of_layers(self, inputs: LayerInputs, layers: int) -> None:
        add, projection = self.library, inputs.projection
        self._norm(None)
        self.project("layer inputs", self._normed, self._layer_inputs, [projection])
        arguments = (self._layer_inputs, self.keep(inputs.table), inputs.table_scale, inputs.scale)
        self.operation("layer inputs", add.layer_inputs, *arguments, self.normalize(inputs.norm), layers)

    def _layer(self, index: int, layer: Layer, residual_scale: float) -> None:
        if layer.attention is not None or layer.mixer is not None:
            self._norm(layer.attention_norm)
        if (mixer := layer.mixer) is not None:
            self._mixers.add(mixer, self._normed, self._attended)
            scale = residual_scale * layer.mixer_factor
            self._add("output", self._attended, mixer.out, layer.attention_out_norm, scale)
        if (attention := layer.attention) is not None:
            self._attention(index, attention)
            if layer.is_parallel and layer.mlp_norm is not layer.attention_norm:
                self._norm(layer.mlp_norm)
            scale = residual_scale * layer.attention_factor
            self._add("output", self._attended, attention.out, layer.attention_out_norm, scale)
        if not layer.is_parallel and layer.mlp is not None:
            self._norm(layer.mlp_norm)
        if layer.mlp is None:
            pass
        elif isinstance(layer.mlp, MLP):
            self._mlp_inner(layer.mlp)
            factor = layer.factor if layer.input_gate is None else 1.0
            scale = residual_scale * layer.mlp.down_factor
            self._add("down", self._mlp, layer.mlp.down, layer.mlp_out_norm, scale, factor)
        elif layer.mlp.norms is None:
            self._mixture(layer.mlp, layer.mlp_out_norm, residual_scale)
        else:
            self._normed_mixture(layer, layer.mlp, layer.mlp.norms, residual_scale)
        if layer.input_gate is not None:
            self._input_gate(index, layer.input_gate, layer.factor)

    def _input_gate(self, index: int, gate: InputGate, factor: float) -> None:
        """Add the operations by which a layer adds to the hidden state what it makes of its inputs."""
        self._norm(None)
        site, weights = self._site(self._normed, [gate.gate]), self._weights([gate.gate])
        x, activation = self._input(self._normed, weights), ACTIVATIONS.index(gate.activation)
        arguments = (x, self._gated, weights, site, activation, self._layer_inputs, index * len(gate.gate.weight))
        self.operation("layer inputs", self.library.gate_inputs, *arguments)
        self._add("layer inputs", self._gated, gate.projection, gate.norm, 1.0, factor)

    def _mlp_inner(self, mlp: MLP) -> None:
        activation = ACTIVATIONS.index(mlp.activation)
        if mlp.gate is None:
            site, weights = self._site(self._normed, [mlp.up]), self._weights([mlp.up])
            x = self._input(self._normed, weights)
            self.operation("up", self.library.activate, x, self._mlp, weights, site, activation)
        else:
            site, weights = self._site(self._normed, [mlp.gate, mlp.up]), self._gated_weights(mlp.gate, mlp.up)
            x = self._input(self._normed, weights)
            self.operation("gate and up", self.library.gate, x, self._mlp, weights, site, activation, mlp.gate_factor)

    def _mixture(self, experts: Experts, norm: Norm | None, scale: float) -> None:
        """Add the operations of a mixture of experts, whose output is normed and added to the hidden state."""
        add, width = self.library, self._width
        assignment = self._route(experts.router)
        self._expert_mlps(experts, assignment)
        adds = norm is None
        out, factor = (self._hidden, scale) if adds else (self._branch, 1.0)
        self.operation("down", add.combine, self._expert_out, out, width, assignment, adds, factor)
        if experts.shared is not None:
            self._mlp_inner(experts.shared)
            if experts.shared_gate is not None:
                inner, site = len(experts.shared.up.weight), self._site(self._normed, [experts.shared_gate])
                gate = self.keep(self._tensor(experts.shared_gate.weight)[0].float())
                self.operation("gate and up", add.scale_rows, self._normed, self._mlp, gate, site, width, inner)
            down = experts.shared.down
            site, weights = self._site(self._mlp, [down]), self._weights([down])
            x = self._input(self._mlp, weights)
            self.operation("down", add.project, x, out, weights, site, True, factor)
        if norm is not None:
            self._add_norm(self._branch, self._hidden, norm, scale)

    def _normed_mixture(self, layer: Layer, experts: Experts, norms: MixtureNorms, scale: float) -> None:
        """Add the operations of a mixture whose parts have norms of their own. That of the shared MLP comes before."""
        add = self.library
        if experts.shared is None or layer.mlp_out_norm is None:
            raise NotKnown("its experts have norms, but no MLP beside them, or no norm behind both")
        self._mlp_inner(experts.shared)
        self.project("down", self._mlp, self._branch, [experts.shared.down])
        self.operation("norm", add.norm_floats, self._branch, self._both, self.normalize(norms.shared_out))
        self._norm(norms.router)
        assignment = self._route(experts.router)
        self._norm(norms.experts)
        self._expert_mlps(experts, assignment)
        self.operation("down", add.combine, self._expert_out, self._branch, self._width, assignment, False, 1.0)
        self._add_norm(self._branch, self._both, norms.experts_out, 1.0)
        factor = layer.factor if layer.input_gate is None else 1.0
        self._add_norm(self._both, self._hidden, layer.mlp_out_norm, scale, factor)

    def _add_norm(self, x: int, hidden: int, norm: Norm, scale: float, factor: float = 1.0) -> None:
        self.operation("norm", self.library.add_norm, x, hidden, self.normalize(norm), scale, factor)

    def _route(self, router: Router) -> int:
        """Add the operations that assign tokens to experts, and return the assignment."""
        add, number = self.library, len(router.weight)
        if number > MOST_EXPERTS:
            raise NotKnown(f"its layers have {number} experts, more than {MOST_EXPERTS}")
        routing = Routing(
            number,
            router.top_k,
            router.groups,
            router.top_groups,
            None if router.bias is None else self.keep(router.bias),
            None if router.factors is None else self.keep(router.factors),
            router.scale,
            router.nearness,
            router.is_sigmoid,
            router.adds_best_two,
            router.renormalizes,
        )
        if (number, router.top_k) not in self._assignments:
            self._assignments[number, router.top_k] = add.add_assignment(self._handle, number, router.top_k)
        assignment = self._assignments[number, router.top_k]
        weight = router.weight.to(add.dtype).contiguous()
        bias = None if router.logits_bias is None else router.logits_bias.data_ptr()
        index = add.add_router(self._handle, weight.data_ptr(), number, self._width, bias)
        site = self._site(self._normed, [router.matrix]) if router.module else NO_SITE
        self.operation("route", add.route, self._normed, self._scores, index, site, routing, assignment)
        self.operation("route", add.sort_rows, assignment)
        return assignment

    def _expert_mlps(self, experts: Experts, assignment: int) -> None:
        """Add the operations that compute the rows of each expert."""
        add, width = self.library, self._width
        if isinstance(experts.activation, ClampedGate):
            gating = Gating(ACTIVATIONS.index("none"), experts.activation.alpha, experts.activation.limit)
        else:
            gating = Gating(ACTIVATIONS.index(experts.activation))
        gates = [self._gated_weights(expert.gate, expert.up) for expert in experts.experts]
        if gates[0] in self._widths:  # a token is quantized once for all its experts
            x, rows = self._input(self._normed, gates[0]), self._expert_groups
            self.operation("route", add.gather_groups, x, rows, width, assignment)
        else:
            rows = self._expert_rows
            self.operation("route", add.gather_rows, self._normed, rows, width, assignment)
        self.operation("gate and up", add.expert_gate, rows, self._expert_inner, gates[0], assignment, gating)
        downs = [self._weights([expert.down]) for expert in experts.experts]
        inner = self._expert_inner
        if downs[0] in self._widths:
            arguments = (inner, self._expert_groups, self._widths[downs[0]], assignment)
            self.operation("quantize", add.quantize_expert_rows, *arguments)
            inner = self._expert_groups
        self.operation("down", add.expert_project, inner, self._expert_out, downs[0], assignment)

    def _norm(self, norm: Norm | None) -> None:
        """Add the operation that norms the hidden state for the matrices. Without a norm it only converts the state."""
        normalize = Normalize(width=self._width) if norm is None else self.normalize(norm)
        self.operation("norm", self.library.norm, self._hidden, self._normed, normalize, False)

    def _attention(self, index: int, attention: Attention) -> None:
        add, heads, cache = self.library, attention.heads, self._cache(index, attention)
        if isinstance(attention.qkv, LatentProjection):
            self._latent_attention(attention, attention.qkv, cache)
            return
        gates = [] if attention.gate is None else [attention.gate]
        self.project("qkv", self._normed, self._qkv, [*attention.qkv, *gates])
        if attention.factors is not None:
            factors = attention.factors
            self.operation("rotary", add.scale_columns, self._qkv, self.keep(factors), len(factors))
        own = (attention.query_norm, attention.key_norm, attention.value_norm)
        norms = [Normalize() if norm is None else self.normalize(norm) for norm in own]
        parts = 1 if attention.cache_of is not None else 2 if attention.values_of_keys else 3
        arguments = (self._qkv, self._queries, cache, heads, self._rotary(attention), *norms, parts)
        self.operation("rotary", add.prepare, *arguments)
        self._attend(attention, self._attended, cache)
        if attention.gate is not None:
            first, width = _qkv_width(attention) - len(attention.gate.weight), len(attention.gate.weight)
            self.operation("attention", add.gate_rows, self._attended, self._qkv, first, width)

    def _latent_attention(self, attention: Attention, qkv: LatentProjection, cache: int) -> None:
        """Add the operations of attention over latent vectors, as src/latent.h has them."""
        add, heads, shape = self.library, attention.heads, attention.shape
        own, rank = attention.rotary_offset, len(qkv.norm.weight)
        x = self._normed
        if qkv.query_down is not None:
            self.project("qkv", x, self._latent, [qkv.query_down])
            width = len(qkv.query_down.weight)
            normalize = Normalize(width=width) if qkv.query_norm is None else self.normalize(qkv.query_norm)
            self.operation("norm", add.norm, self._latent, self._normed_latent, normalize, False)
            x = self._normed_latent
        self.project("qkv", x, self._qkv, [qkv.query])
        self.project("qkv", self._normed, self._latent, [qkv.down])
        self.operation("norm", add.norm, self._latent, self._normed_latent, self.normalize(qkv.norm), False)
        arguments = (self._qkv, self._latent, self._normed_latent, self._own, self._queries, cache, heads)
        self.operation("rotary", add.prepare_latent, *arguments, self._rotary(attention))
        keys, values = self._tensor(qkv.up.weight).unflatten(0, (heads, -1)).split([own, shape.value_dim], dim=1)
        site = self._site_of_heads(self._own, HeadRows(qkv.up, heads, 0, own, is_transposed=True), own)
        weights, sizes = self._weights_of_heads(keys.mT), (heads, rank, own, shape.latent_dim)
        self.operation("qkv", add.project_heads, self._own, self._queries, weights, site, *sizes)
        latent = self._attended_latent
        self._attend(attention, latent, cache)
        site = self._site_of_heads(latent, HeadRows(qkv.up, heads, own, shape.value_dim, is_transposed=False), rank)
        weights, sizes = self._weights_of_heads(values), (heads, shape.value_dim, rank, shape.value_dim)
        self.operation("output", add.project_heads, latent, self._attended, weights, site, *sizes)

    def _weights_of_heads(self, weight: Tensor) -> int:
        """Pack the matrices [heads, n, k] of all heads, so that the rows of each begin with a panel."""
        missing = -weight.shape[1] % PANEL
        return self._weights([Matrix(torch.nn.functional.pad(weight, (0, 0, 0, missing)).flatten(0, 1), None)])

    def _attend(self, attention: Attention, out: int, cache: int) -> None:
        parameters = attention.parameters
        window, softcap = parameters.sliding_window or 0, parameters.softcap or 0.0
        sinks = None if attention.sinks is None else self.keep(attention.sinks)
        slopes = None if parameters.slopes is None else self.keep(parameters.slopes)
        arguments = (self._queries, out, cache, attention.heads, parameters.scaling, window, softcap, sinks, slopes)
        self.operation("attention", self.library.attend, *arguments)

    def _rotary(self, attention: Attention) -> Rotary:
        table = attention.rotary
        if table is None:
            return Rotary()
        tables = (self.keep(table.cosines), self.keep(table.sines))
        sizes = (attention.rotary_offset, table.cosines.shape[1], table.apart)
        factors = None if table.query_factors is None else self.keep(table.query_factors)
        return Rotary(*tables, *sizes, table.is_interleaved, attention.rotates_before_norms, factors)

    def project(self, name: str, x: int, out: int, matrices: list[Matrix]) -> None:
        """Add the operation that writes the products with all `matrices` to `out`, side by side."""
        site, weights = self._site(x, matrices), self._weights(matrices)
        x = self._input(x, weights)
        self.operation(name, self.library.project, x, out, weights, site, False, 1.0)

    def _cache(self, index: int, attention: Attention) -> int:
        owner = attention.cache_of
        if owner is None:
            self._cache_indices[index] = self._new_cache(attention)
        return self._cache_indices[index if owner is None else owner]

    def _new_cache(self, attention: Attention) -> int:
        shape, size = attention.shape, self._block_size
        cache = new_cache(shape, self.library.dtype, num_blocks=self._num_blocks, block_size=size)
        self.caches.append(cache)
        if isinstance(attention.qkv, LatentProjection):
            rank = len(attention.qkv.norm.weight)
            memory = CacheMemory(cache.keys.data_ptr(), None, 1, shape.latent_dim, rank, size, False)
            return self.library.add_cache(self._handle, memory)  # type: ignore[no-any-return]
        pointers = (cache.keys.data_ptr(), cache.values.data_ptr())
        memory = CacheMemory(*pointers, shape.kv_heads, shape.key_dim, shape.value_dim, size, shape.is_int8)
        return self.library.add_cache(self._handle, memory)  # type: ignore[no-any-return]

    def operation(self, name: str, add: Callable[..., int], *arguments: Any) -> int:
        self.names.append(name)
        return add(self._handle, *arguments)

    def _site(self, x: int, matrices: list[Matrix]) -> int:
        """Let adapters add to the product of `x` with these matrices, which is the next operation. Return the site."""
        if not self._has_adapters:
            return NO_SITE
        self.sites.append(matrices)
        return self.operation("adapters", self.library.site, x, 1, 0)

    def _site_of_heads(self, x: int, rows: HeadRows, each: int) -> int:
        """Do the same for the product of each head's numbers, which are `each` apart in `x`, with its own rows."""
        if not self._has_adapters:
            return NO_SITE
        self.sites.append(rows)
        return self.operation("adapters", self.library.site, x, rows.heads, each)

    def _add(self, name: str, x: int, matrix: Matrix, norm: Norm | None, scale: float, factor: float = 1.0) -> None:
        """Add the operations that multiply with `matrix`, norm the product, and add it to the hidden state.

        With a norm, the hidden state is then multiplied by `factor`.
        """
        site, weights = self._site(x, [matrix]), self._weights([matrix])
        x = self._input(x, weights)
        if norm is None:
            self.operation(name, self.library.project, x, self._hidden, weights, site, True, scale)
        else:
            self.operation(name, self.library.project, x, self._branch, weights, site, False, 1.0)
            self._add_norm(self._branch, self._hidden, norm, scale, factor)

    def _weights(self, matrices: list[Matrix]) -> int:
        """Pack the rows of all `matrices` as one matrix, and return its index."""
        bias = None
        if any(m.bias is not None for m in matrices):
            biases = [torch.zeros(len(m.weight)) if m.bias is None else m.bias.float() for m in matrices]
            bias = torch.cat(biases).contiguous()
        blocks = [m.weight for m in matrices if isinstance(m.weight, Blocks)]
        if (
            len(blocks) == len(matrices)
            and all(len(rows) % PANEL == 0 for rows in blocks[:-1])
            and all(_have_one_order(blocks[0], rows) for rows in blocks[1:])
        ):
            return self._block_weights(matrices[0].weight, blocks, bias)
        tensors = [self._tensor(m.weight) for m in matrices]
        weight = torch.cat(tensors) if len(tensors) > 1 else tensors[0].contiguous()
        n, k = weight.shape
        bias_pointer = None if bias is None else bias.data_ptr()
        return self.library.add_weights(self._handle, weight.data_ptr(), n, k, bias_pointer)  # type: ignore[no-any-return]

    def _gated_weights(self, gate: Matrix, up: Matrix) -> int:
        n, k = gate.weight.shape
        bias = None
        if gate.bias is not None or up.bias is not None:
            halves = [torch.zeros(n) if matrix.bias is None else matrix.bias.float() for matrix in (gate, up)]
            bias = torch.from_numpy(_side_by_side(*(half.numpy() for half in halves)))
        if (
            isinstance(gate.weight, Blocks)
            and isinstance(up.weight, Blocks)
            and gate.weight.kind == up.weight.kind
            and _have_one_order(gate.weight, up.weight)
        ):
            rows = _side_by_side(gate.weight.addresses(), up.weight.addresses())
            scales = [gate.weight.scale_addresses(), up.weight.scale_addresses()]
            together = None if scales[0] is None or scales[1] is None else _side_by_side(scales[0], scales[1])
            kinds = np.full(len(rows) // PANEL, gate.weight.kind, np.int32)
            index = self._pack(rows, together, kinds, len(rows), k, bias, gate.weight.columns)
            gate.weight.give_back()
            up.weight.give_back()
            return index
        both = [self._tensor(matrix.weight).contiguous() for matrix in (gate, up)]
        pointers = [tensor.data_ptr() for tensor in both]
        bias_pointer = None if bias is None else bias.data_ptr()
        return self.library.add_gated_weights(self._handle, *pointers, n, k, bias_pointer)  # type: ignore[no-any-return]

    def _block_weights(self, whole: Tensor | Blocks, parts: list[Blocks], bias: Tensor | None) -> int:
        """Pack the rows of all parts, whose formats may differ. `whole` is what other parts of the model may share."""
        if len(parts) == 1 and bias is None and id(whole) in self._block_indices:
            return self._block_indices[id(whole)]
        rows = _padded(np.concatenate([part.addresses() for part in parts]), PANEL)
        kinds = np.concatenate([np.full(-(-len(part) // PANEL), part.kind, np.int32) for part in parts])
        found = [addresses for part in parts if (addresses := part.scale_addresses()) is not None]
        scales = _padded(np.concatenate(found), PANEL) if found else None
        n, k = sum(len(part) for part in parts), parts[0].shape[1]
        index = self._pack(rows, scales, kinds, n, k, bias, parts[0].columns)
        for part in parts:
            part.give_back()
        if len(parts) == 1 and bias is None:
            self._block_indices[id(whole)] = index
        return index

    def _pack(
        self,
        rows: NDArray[np.uintp],
        scales: NDArray[np.uintp] | None,
        kinds: NDArray[np.int32],
        n: int,
        k: int,
        bias: Tensor | None,
        columns: NDArray[np.int32] | None,
    ) -> int:
        add = self.library.add_blocks if scales is None else self.library.add_blocks_apart
        others = kinds.ctypes.data if scales is None else scales.ctypes.data
        bias_pointer = None if bias is None else bias.data_ptr()
        index: int = add(self._handle, self._pool, rows.ctypes.data, others, n, k, bias_pointer)
        self._widths[index] = k
        if columns is not None:
            self._orders[index] = self.keep(torch.from_numpy(columns))
        return index

    def _tensor(self, weight: Tensor | Blocks) -> Tensor:
        """Return a matrix in the dtype of the step, for which blocks are expanded."""
        return weight.expand(self.library.dtype) if isinstance(weight, Blocks) else weight

    def normalize(self, norm: Norm) -> Normalize:
        bias = None if norm.bias is None else self.keep(norm.bias)
        return Normalize(self.keep(norm.weight), bias, len(norm.weight), norm.epsilon, norm.subtracts_mean)

    def floats(self, width: int, rows_each: int = 1) -> int:
        return self.library.add_floats(self._handle, _whole(width), rows_each)  # type: ignore[no-any-return]

    def elements(self, width: int, rows_each: int = 1) -> int:
        return self.library.add_elements(self._handle, _whole(width), rows_each)  # type: ignore[no-any-return]

    def keep(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def _qkv_width(attention: Attention) -> int:
    """Return how many numbers of a token are computed at once: of latent attention, only queries."""
    if isinstance(attention.qkv, LatentProjection):
        return attention.heads * attention.shape.key_dim
    gates = 0 if attention.gate is None else len(attention.gate.weight)
    return sum(len(matrix.weight) for matrix in attention.qkv) + gates


def _up(width: int) -> int:
    return -(-width // LANES) * LANES


def _whole(width: int) -> int:
    """Return `width`. Raises NotKnown unless it is a multiple of LANES."""
    if width % LANES:
        raise NotKnown(f"a row of {width} numbers is no multiple of {LANES}")
    return width


def _matrices(layer: Layer) -> list[Matrix]:
    """Return the matrices of a layer that may be in blocks."""
    parts: list[Matrix | None] = []
    if (attention := layer.attention) is not None:
        qkv = attention.qkv
        parts += qkv if isinstance(qkv, list) else [qkv.query_down, qkv.query, qkv.down]
        parts += [attention.gate, attention.out]
    if layer.mixer is not None:
        parts += matrices_of(layer.mixer)
    if layer.input_gate is not None:
        parts += [layer.input_gate.gate, layer.input_gate.projection]
    found = [matrix for matrix in parts if matrix is not None]
    mlps: list[MLP | Expert | None] = [layer.mlp] if isinstance(layer.mlp, MLP) else []
    if isinstance(layer.mlp, Experts):
        mlps = [layer.mlp.experts[0], layer.mlp.shared]  # the experts of a layer are alike
    for mlp in mlps:
        if mlp is not None:
            found += [matrix for matrix in (mlp.gate, mlp.up, mlp.down) if matrix is not None]
    return found


def _have_one_order(first: Blocks, second: Blocks) -> bool:
    """Return whether two matrices have their columns in the same order, so that they can read the same input."""
    if first.columns is None or second.columns is None:
        return first.columns is second.columns
    return np.array_equal(first.columns, second.columns)


def _padded(numbers: NDArray[Any], multiple: int) -> NDArray[Any]:
    """Return the numbers, and zeros up to a multiple."""
    return np.append(numbers, np.zeros(-len(numbers) % multiple, numbers.dtype))


def _side_by_side(of_gate: NDArray[Any], of_up: NDArray[Any]) -> NDArray[Any]:
    """Return what belongs to the rows of both matrices in the order of gated weights: a panel has sixteen of each."""
    halves = [_padded(numbers, LANES).reshape(-1, 1, LANES) for numbers in (of_gate, of_up)]
    return np.concatenate(halves, axis=1).reshape(-1)
