"""Describes a transformers decoder by its operations and weights, which are found by the names of its modules.

Names can mislead, so two checks come before the description is used: this module checks that the description contains
every parameter of the model, and `start.py` checks that the outputs are the model's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.cpu import describe_mixers
from oaiserve.engine.model.cpu.blocks import Blocks, ExpertBlocks
from oaiserve.engine.model.cpu.description import (
    MLP,
    Attention,
    AttentionParameters,
    ClampedGate,
    Decoder,
    Expert,
    Experts,
    InputGate,
    LatentProjection,
    Layer,
    LayerInputs,
    Matrix,
    Mixer,
    MixtureNorms,
    Norm,
    NotKnown,
    RotaryTable,
    Router,
    by_kind,
    fit,
)
from oaiserve.engine.model.layer_operations import ACTIVATIONS
from oaiserve.engine.model.spec import KVShape, LoadedModel, is_linear

# In these families only the layers with a window rotate queries and keys by position.
_ROTATE_IN_WINDOWS = {"cohere2", "exaone4", "exaone_moe"}
# The names of norms of queries and keys, and those of norms that come after the rotation.
_QUERY_NORMS, _KEY_NORMS = ("q_norm", "q_layernorm", "query_layernorm"), ("k_norm", "k_layernorm", "key_layernorm")
_AFTER_ROTATION = "query_layernorm"
_EXPERT_BIASES = ("e_score_correction_bias", "expert_bias")


@torch.inference_mode()
def describe(
    loaded: LoadedModel,
    parameters: dict[int, AttentionParameters],
    blocks: Mapping[str, Blocks | ExpertBlocks] | None = None,
) -> Decoder:
    """Describe the model. `parameters` are those of its attention, by layer index.

    The model's parameters in `blocks`, by name, are described by these in place of their own data: a tensor of all
    experts by what there is of each. Raises NotKnown.
    """
    return _Reader(loaded, parameters, blocks or {}).decoder()


class _Reader:
    """Reads the modules of one model, and keeps track of which parameters it has read."""

    def __init__(
        self,
        loaded: LoadedModel,
        parameters: dict[int, AttentionParameters],
        blocks: Mapping[str, Blocks | ExpertBlocks],
    ) -> None:
        self.loaded = loaded
        self._model = loaded.model
        self._config = loaded.model.config
        self._base = getattr(loaded.model.base_model, "decoder", loaded.model.base_model)
        self._parameters = parameters
        self._blocks = {id(loaded.model.get_parameter(name)): found for name, found in blocks.items()}
        self._read: set[int] = set()  # the id() of each parameter that the description contains
        self._rotary_tables: dict[str | None, RotaryTable] = {}  # by layer type if tables differ between types
        self._names = {id(module): name for name, module in loaded.model.named_modules()}

    def decoder(self) -> Decoder:
        embedding = self.child(self._base, "embed_tokens", "wte", "embed_in", "word_embeddings", "embeddings")
        position = self.child(self._base, "wpe", "embed_positions", optional=True)
        config = self._config
        if any(getattr(one, "clip_qkv", None) for one in (config, getattr(config, "attn_config", None))):
            raise NotKnown("it limits queries, keys and values")
        layers = self.child(self._base, "layers", "h", "blocks")
        decoder = Decoder(
            embedding=self._weights(embedding),
            embedding_scale=float(getattr(embedding, "embed_scale", 1)) * getattr(config, "embedding_multiplier", 1.0),
            position_embedding=None if position is None else self._tensor(position)[getattr(position, "offset", 0) :],
            embedding_norm=self._norm_of(self._base, "word_embeddings_layernorm"),
            layer_inputs=self._layer_inputs(),
            layers=[self._layer(index, layer) for index, layer in enumerate(layers)],
            residual_scale=getattr(config, "residual_multiplier", getattr(layers[0], "residual_scale", 1.0)),
            final_norm=self.norm(
                self.child(
                    self._base, "norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm"
                )
            ),
            head=self.matrix(self._model.get_output_embeddings()),
            logits_scale=getattr(config, "logit_scale", None)
            or getattr(config, "lm_head_multiplier", None)
            or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
        )
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._read:
                raise NotKnown(f"it has a parameter '{name}'")
        if not fit(decoder):
            raise NotKnown("the sizes of its matrices do not fit together")
        return decoder

    def _layer_inputs(self) -> LayerInputs | None:
        base = self._base
        table = self.child(base, "embed_tokens_per_layer", optional=True)
        if table is None:
            return None
        if isinstance(rows := self._weights(table), Blocks):
            raise NotKnown("it has an embedding for each layer in blocks")
        norm = self.norm(self.child(base, "per_layer_projection_norm"))
        # The projection has a factor before its norm, which is as if the norm had another epsilon.
        factor = float(self.child(base, "per_layer_model_projection_scale"))
        return LayerInputs(
            table=rows,
            table_scale=float(table.embed_scale),
            projection=self.matrix(self.child(base, "per_layer_model_projection")),
            norm=replace(norm, epsilon=norm.epsilon / factor**2),
            scale=float(self.child(base, "per_layer_input_scale")),
        )

    def _layer(self, index: int, layer: Module) -> Layer:
        if not getattr(layer, "do_layer_norm_before", True):
            raise NotKnown("it norms the hidden state itself")
        mixer = None if index not in self.loaded.state_shapes else describe_mixers.mixer(self, index, layer)
        if hasattr(layer, "norm"):
            return self._single_part(index, layer, mixer)
        attention = self.child(layer, "self_attn", "attn", "attention", "self_attention", optional=mixer is not None)
        attention_norm = self._norm_of(
            layer, "input_layernorm", "ln_1", "norm_1", "ln_attn", "self_attn_layer_norm", "operator_norm"
        )
        after_attention = self._norm_of(layer, "post_self_attn_layernorm")
        between = self._norm_of(layer, "post_attention_layernorm", "ln_2", "norm_2", "ln_mlp", "final_layer_norm")
        before_mlp = self._norm_of(layer, "pre_feedforward_layernorm", "pre_ff_layernorm", "ffn_norm")
        # `post_attention_layernorm` is the norm before the MLP. If the MLP has its own, or attention has no norm before
        # it, that name is the norm of attention's output.
        if before_mlp is None and attention_norm is not None:
            before_mlp = between
        else:
            after_attention = between
        is_parallel = before_mlp is None and attention_norm is not None
        is_parallel = getattr(layer, "use_parallel_residual", is_parallel) or hasattr(layer, "ln_mlp")
        beside = self.child(layer, "shared_mlp", optional=True)
        mlp = (
            layer
            if hasattr(layer, "fc1")
            else self.child(layer, "mlp", "ffn", "block_sparse_moe", "feed_forward", optional=beside is not None)
        )
        if mlp is None:  # a mixture without experts
            mlp, beside = beside, None
        mlp_out_norm = self._norm_of(layer, "post_feedforward_layernorm", "post_mlp_layernorm")
        gate = self.child(layer, "per_layer_input_gate", optional=True)
        factor = float(getattr(layer, "layer_scalar", 1.0))
        if factor != 1 and mlp_out_norm is None and gate is None:
            raise NotKnown("its layers scale the hidden state without a norm before")
        return Layer(
            attention_norm=attention_norm,
            attention=None if attention is None else self._attention(index, attention),
            attention_factor=float(getattr(layer, "attn_out_multiplier", 1.0)),
            mixer=mixer,
            mixer_factor=float(getattr(layer, "ssm_out_multiplier", 1.0)),
            attention_out_norm=after_attention,
            mlp_norm=attention_norm if is_parallel and before_mlp is None else before_mlp,
            mlp=self._mlp_or_experts(mlp, beside)
            if getattr(layer, "experts", None) is None
            else self._mixture_beside(layer, mlp),
            mlp_out_norm=mlp_out_norm,
            is_parallel=is_parallel,
            input_gate=None
            if gate is None
            else InputGate(
                gate=self.matrix(gate),
                activation=self._activation(self.child(layer, "act_fn")),
                projection=self.matrix(self.child(layer, "per_layer_projection")),
                norm=self.norm(self.child(layer, "post_per_layer_input_norm")),
            ),
            factor=factor,
        )

    def _single_part(self, index: int, layer: Any, mixer: Mixer | None) -> Layer:
        """Describe a layer that is a norm and one part behind it: one with a state, attention or an MLP."""
        norm = self.norm(layer.norm)
        attends = index in self.loaded.kv_shapes
        computes = mixer is None and not attends
        return Layer(
            attention_norm=None if computes else norm,
            attention=self._attention(index, self.child(layer, "mixer")) if attends else None,
            attention_factor=1.0,
            mixer=mixer,
            mixer_factor=1.0,
            attention_out_norm=None,
            mlp_norm=norm if computes else None,
            mlp=self._mlp_or_experts(self.child(layer, "mixer"), None) if computes else None,
            mlp_out_norm=None,
            is_parallel=False,
            input_gate=None,
            factor=1.0,
        )

    def _attention(self, index: int, attention: Any) -> Attention:
        attention = self.child(attention, "attention", optional=True) or attention
        is_sharing = getattr(attention, "is_kv_shared_layer", False)
        owner: int = attention.layer_idx if is_sharing else index  # the layer whose cache it uses
        shape = self.loaded.kv_shapes.get(owner)
        if shape is None or (is_sharing and owner == index):
            raise NotKnown(f"its layer {index} takes its keys and values from another one")
        if getattr(attention, "v_scale", 1.0) != 1:  # MiMo-V2-Flash's
            raise NotKnown("it multiplies its values by a number")
        parameters, values_of_keys = self._parameters[owner], False
        out = self.matrix(self.child(attention, "o_proj", "out_proj", "dense", "c_proj"))
        gate: Matrix | None = None
        qkv: list[Matrix] | LatentProjection
        if self.child(attention, "kv_a_proj_with_mqa", optional=True) is not None:
            if not shape.latent_dim:
                raise NotKnown("its latent vectors have sizes that are no multiples of 16, or that are too large")
            qkv, heads = self._latent(attention), shape.kv_heads
        else:
            qkv = [self.matrix(self.child(attention, "q_proj"))] if is_sharing else self._qkv(attention, shape)
            values_of_keys = len(qkv) == 2
            own_heads = out.weight.shape[1] // shape.value_dim
            if len(qkv) == 3 and len(qkv[0].weight) == 2 * own_heads * shape.key_dim:
                # The query of each head is followed by a gate for what the head gives.
                rows = torch.arange(len(qkv[0].weight)).unflatten(0, (own_heads, 2, -1))
                qkv[0], gate = (qkv[0].picked(rows[:, part].flatten()) for part in (0, 1))
            num_rows = sum(len(matrix.weight) for matrix in qkv)
            values = 0 if values_of_keys else shape.value_dim
            of_keys = 0 if is_sharing else shape.kv_heads * (shape.key_dim + values)
            heads, rest = divmod(num_rows - of_keys, shape.key_dim)
            if rest or heads < 1 or heads % shape.kv_heads:
                raise NotKnown(f"its projections have {num_rows} rows, which make no whole heads")
        return Attention(
            qkv=qkv,
            gate=gate,
            factors=self._factors(attention, qkv),
            cache_of=owner if is_sharing else None,
            values_of_keys=values_of_keys,
            out=out,
            heads=heads,
            shape=shape,
            query_norm=self._norm_of(attention, *_QUERY_NORMS),
            key_norm=self._norm_of(attention, *_KEY_NORMS),
            value_norm=None
            if (value_norm := getattr(attention, "v_norm", None)) is None
            else _unscaled(value_norm, shape.value_dim),
            rotary=self._rotary(index, attention, parameters),
            rotary_offset=attention.qk_nope_head_dim if isinstance(qkv, LatentProjection) else 0,
            rotates_before_norms=hasattr(attention, _AFTER_ROTATION),
            sinks=self.parameter(attention, "sinks").float() if parameters.has_sinks else None,
            parameters=self._scaled(parameters, attention),
        )

    def _factors(self, attention: Any, qkv: list[Matrix] | LatentProjection) -> Tensor | None:
        """Return what queries, keys and values are multiplied by, row by row."""
        of_keys = float(getattr(attention, "key_multiplier", 1.0))
        of_all = float(getattr(self._config, "attention_in_multiplier", 1.0))
        if (of_keys, of_all) == (1, 1):
            return None
        if isinstance(qkv, LatentProjection) or len(qkv) != 3 or any(matrix.bias is not None for matrix in qkv):
            raise NotKnown("it multiplies queries and keys that have biases, or no matrices of their own")
        factors = (of_all, of_all * of_keys, of_all)
        return torch.cat([torch.full((len(m.weight),), factor) for m, factor in zip(qkv, factors, strict=True)])

    def _scaled(self, parameters: AttentionParameters, attention: Any) -> AttentionParameters:
        """Return the parameters for queries as they are, where a layer has scaled them itself."""
        own = float(getattr(attention, "scaling", 1.0))
        return replace(parameters, scaling=own) if parameters.scaling == 1 else parameters

    def _qkv(self, attention: Module, shape: KVShape) -> list[Matrix]:
        if (by_head := self.child(attention, "query_key_value", optional=True)) is not None:
            matrix, heads = self.matrix(by_head), shape.kv_heads
            parts, rest = divmod(len(matrix.weight), heads * shape.key_dim)
            if isinstance(matrix.weight, Blocks) or rest or shape.key_dim != shape.value_dim:
                raise NotKnown("its projections are sorted by head")
            bias = None if matrix.bias is None else by_kind(matrix.bias, heads, parts)
            weight = by_kind(matrix.weight, heads, parts)
            return [replace(matrix, weight=weight, bias=bias, heads=heads, parts=parts)]
        if (together := self.child(attention, "qkv_proj", "c_attn", "Wqkv", optional=True)) is not None:
            matrix = self.matrix(together)
            return self._in_groups(matrix) if self._config.model_type == "codegen" else [matrix]
        names = ["q_proj", "k_proj", "v_proj"]
        if getattr(attention, "use_alternative_attention", False):  # whose values are its keys
            names.remove("v_proj")
        return [self.matrix(self.child(attention, name)) for name in names]

    def _in_groups(self, matrix: Matrix) -> list[Matrix]:
        """Return CodeGen's queries, keys and values: each of four groups of heads has its queries, values and keys."""
        groups, parts = 4, 3
        if isinstance(matrix.weight, Blocks):
            raise NotKnown("its projections are sorted by groups of heads")
        queries, values, keys = by_kind(matrix.weight, groups, parts).chunk(parts)
        found = [replace(matrix, weight=rows, heads=groups, parts=parts) for rows in (queries, keys, values)]
        return [replace(one, first_row=number * len(queries)) for one, number in zip(found, (0, 2, 1), strict=True)]

    def _latent(self, attention: Any) -> LatentProjection:
        query_down = self.child(attention, "q_a_proj", optional=True)
        found = LatentProjection(
            query_down=None if query_down is None else self.matrix(query_down),
            query_norm=self._norm_of(attention, "q_a_layernorm"),
            query=self.matrix(self.child(attention, "q_proj" if query_down is None else "q_b_proj")),
            down=self.matrix(self.child(attention, "kv_a_proj_with_mqa")),
            norm=self.norm(self.child(attention, "kv_a_layernorm")),
            up=self.matrix(self.child(attention, "kv_b_proj")),
        )
        if found.up.bias is not None:
            raise NotKnown("its keys and values are made from latent vectors with a bias")
        return found

    def _rotary(self, index: int, attention: Module, parameters: AttentionParameters) -> RotaryTable | None:
        rotary = self.child(self._base, "rotary_emb", "pos_emb", optional=True)
        if (of_layer := self.child(attention, "embed_positions", optional=True)) is not None:  # of pairs of neighbours
            sines, cosines = (table.contiguous() for table in of_layer.float().chunk(2, dim=-1))
            return RotaryTable(cosines, sines, True, 1, None)
        is_left_out = parameters.slopes is not None  # which tell positions apart
        is_left_out |= self._config.model_type in _ROTATE_IN_WINDOWS and parameters.sliding_window is None
        if rotary is None or is_left_out or not getattr(attention, "use_rope", True):
            return None
        layer_type = None
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            layer_type = self._config.layer_types[index]
        if layer_type not in self._rotary_tables:
            positions = torch.arange(self.loaded.max_model_len)[None]
            tables = rotary(torch.zeros(1), positions, *([] if layer_type is None else [layer_type]))
            if isinstance(tables, Tensor) and tables.is_complex():  # which turns pairs of neighbours
                real, imaginary = torch.view_as_real(tables[0]).float().unbind(-1)
                self._rotary_tables[layer_type] = RotaryTable(real.contiguous(), imaginary.contiguous(), True, 1, None)
                return self._rotary_tables[layer_type]
            cosines, sines = (_of_pairs(table[0]) for table in tables)
            # Applying the family's `rotate_half` to 0, 1, 2, 3 shows whether neighbours are pairs.
            rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
            is_interleaved = rotate_half is not None and rotate_half(torch.arange(4)).tolist() == [-1, 0, -3, 2]
            # Latent attention may put what it has rotated in another order, in queries and keys: their products stay.
            is_interleaved |= bool(getattr(self._config, "rope_interleave", False))
            # Where only the first pairs turn, the tables need no columns for the others.
            apart, turning = cosines.shape[1], (cosines != 1).any(0).nonzero().flatten()
            pairs = int(turning[-1]) + 1 if len(turning) else apart
            cosines, sines = (table[:, :pairs].contiguous() for table in (cosines, sines))
            self._rotary_tables[layer_type] = RotaryTable(
                cosines, sines, is_interleaved, apart, self._query_factors(positions[0])
            )
        return self._rotary_tables[layer_type]

    def _query_factors(self, positions: Tensor) -> Tensor | None:
        rope = getattr(self._config, "rope_parameters", None) or {}
        if (beta := rope.get("llama_4_scaling_beta")) is None:
            return None
        if getattr(self._config, "kv_lora_rank", None) is not None:
            raise NotKnown("it scales queries of latent attention by their positions")
        factors: Tensor = 1 + beta * (1 + positions // rope["original_max_position_embeddings"]).float().log()
        return factors

    def _mlp_or_experts(self, mlp: Module, beside: Module | None) -> MLP | Experts:
        """Describe an MLP, or a mixture of experts with what all tokens share, within its module or `beside` it."""
        experts = self.child(mlp, "experts", optional=True)
        if experts is None:
            return self._mlp(mlp)
        shared = self.child(mlp, "shared_experts", "shared_expert", "shared_mlp", optional=True) or beside
        shared_gate = self.child(mlp, "shared_expert_gate", optional=True)
        gates_and_ups = self._expert_matrices(experts, "gate_up_proj", 2)
        downs = self._expert_matrices(experts, "down_proj", 1)
        return Experts(
            router=self._router(mlp),
            experts=[Expert(gate, up, down) for (gate, up), (down,) in zip(gates_and_ups, downs, strict=True)],
            activation=self._gating(experts),
            shared=None if shared is None else self._mlp(shared),
            shared_gate=None if shared_gate is None else self.matrix(shared_gate),
            norms=None,
        )

    def _mixture_beside(self, layer: Module, mlp: Module) -> Experts:
        """Describe experts beside an MLP that all tokens share, where both have norms of their own."""
        router, experts = self.child(layer, "router"), self.child(layer, "experts")
        scale = self.parameter(router, "scale").float() * float(self.child(router, "scalar_root_size"))
        norm = replace(_unscaled(self.child(router, "norm"), len(scale)), weight=scale)
        gates_and_ups = self._expert_matrices(experts, "gate_up_proj", 2)
        downs = self._expert_matrices(experts, "down_proj", 1)
        return Experts(
            router=self._router(layer, norm),
            experts=[Expert(gate, up, down) for (gate, up), (down,) in zip(gates_and_ups, downs, strict=True)],
            activation=self._gating(experts),
            shared=self._mlp(mlp),
            shared_gate=None,
            norms=MixtureNorms(
                router=norm,
                experts=self.norm(self.child(layer, "pre_feedforward_layernorm_2")),
                experts_out=self.norm(self.child(layer, "post_feedforward_layernorm_2")),
                shared_out=self.norm(self.child(layer, "post_feedforward_layernorm_1")),
            ),
        )

    def _expert_matrices(self, experts: Module, name: str, parts: int) -> list[list[Matrix]]:
        """Return for each expert what it has under this name: its gate and its up projection if there are two parts."""
        tensor = self._tensor(experts, name)
        is_interleaved = not getattr(experts, "is_concatenated", True)

        def cut(rows: Tensor) -> list[Tensor]:
            return [rows[part::parts] for part in range(parts)] if is_interleaved else list(rows.chunk(parts))

        weights: Sequence[Sequence[Tensor | Blocks]]
        biases: Sequence[Sequence[Tensor | None]]
        kept = self._blocks.get(id(getattr(experts, name)))
        if isinstance(kept, list):
            weights = kept
        else:
            weights = [cut(rows) for rows in (tensor.mT if getattr(experts, "is_transposed", False) else tensor)]
        if getattr(experts, f"{name}_bias", None) is None:
            biases = [[None] * parts] * len(weights)
        else:
            biases = [cut(rows) for rows in self.parameter(experts, f"{name}_bias").float()]
        return [
            [Matrix(weight, bias) for weight, bias in zip(own, own_biases, strict=True)]
            for own, own_biases in zip(weights, biases, strict=True)
        ]

    def _gating(self, experts: Any) -> str | ClampedGate:
        """Return what experts do with gate and up: the name of an activation if it is activation(gate) * up.

        Their outputs show it, for large numbers too, because some families clamp these.
        """
        if not hasattr(experts, "_apply_gate"):
            return self._activation(self.child(experts, "act_fn"))
        gate, up = torch.cartesian_prod(torch.linspace(-20, 20, 41), torch.linspace(-18, 18, 7)).unbind(-1)
        together = torch.cat([gate, up]) if experts.is_concatenated else torch.stack([gate, up], dim=-1).flatten()
        expected = experts._apply_gate(together)
        kinds: dict[str | ClampedGate, Tensor] = {name: known(gate) * up for name, known in ACTIVATIONS.items()}
        alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
        if isinstance(alpha, float) and isinstance(limit, float):
            clamped = ClampedGate(alpha, limit)
            kinds[clamped] = clamped(gate, up)
        for kind, found in kinds.items():
            if torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                return kind
        raise NotKnown(f"its {type(experts).__name__} combines gate and up in another way")

    def _router(self, mlp: Module, norm: Norm | None = None) -> Router:
        """Find out what the router of a mixture does from its outputs, because families differ in it, and in names.

        `norm` is what it does with its inputs before.
        """
        router: Any = self.child(mlp, "gate", "router")
        linear = self.child(router, "wg", "proj", optional=True) or router
        weight = self.parameter(linear, "weight")
        logits_bias = None if getattr(linear, "bias", None) is None else self.parameter(linear, "bias").float()
        bias = None
        for module in (mlp, *router.modules()):
            if (found := self.child(module, *_EXPERT_BIASES, optional=True)) is not None:
                bias = found.detach().float().flatten()
                self._read.add(id(found))
        groups = int(self.child(router, "num_group", optional=True) or 1)
        factors = None
        if getattr(router, "per_expert_scale", None) is not None:
            factors = self.parameter(router, "per_expert_scale").float()
        top_k = self.child(router, "top_k", optional=True) or getattr(self._config, "top_k_experts", None)
        if top_k is None:
            raise NotKnown(f"its {type(router).__name__} has no top_k")
        plain = Router(
            weight=weight,
            module=self._names[id(linear)] if is_linear(linear) else "",
            logits_bias=logits_bias,
            bias=bias,
            top_k=int(top_k),
            groups=groups,
            top_groups=int(self.child(router, "topk_group", optional=True) or groups),
            is_sigmoid=False,
            adds_best_two=False,
            renormalizes=False,
            scale=float(self.child(router, "routed_scaling_factor", optional=True) or 1.0),
            factors=factors,
            nearness=0.0,
        )
        mixer = replace(plain, nearness=2 * float(getattr(router, "router_jitter_noise", 0.0)))
        # In float32, in which no two experts are equally good for a token.
        own = deepcopy(router).float()
        generator = torch.Generator(weight.device).manual_seed(0)
        x = torch.randn(16, weight.shape[1], generator=generator, device=weight.device)
        try:
            takes_bias = not inspect.signature(own.forward).parameters.keys().isdisjoint(_EXPERT_BIASES)
            _, weights, chosen = own(x, bias) if takes_bias else own(x)
            expected = torch.zeros(len(x), len(weight)).scatter(-1, chosen, weights.float())
        except (RuntimeError, TypeError, ValueError) as error:
            raise NotKnown(f"its {type(router).__name__} takes other arguments: {error}") from error
        if norm is not None:
            x = norm(x)
        kinds = [mixer] if mixer.nearness else []
        for is_sigmoid, adds_best_two, renormalizes in product((False, True), repeat=3):
            kind = replace(plain, is_sigmoid=is_sigmoid, adds_best_two=adds_best_two, renormalizes=renormalizes)
            kinds += [kind, replace(kind, groups=1, top_groups=1)]
        for kind in kinds:
            if torch.allclose(kind(x), expected, rtol=1e-3, atol=1e-5):
                return kind
        raise NotKnown(f"its {type(router).__name__} chooses experts in another way")

    def _mlp(self, mlp: Module) -> MLP:
        down = self.matrix(
            self.child(mlp, "down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "output_linear", "w2")
        )
        function = self.child(
            mlp, "act_fn", "activation_fn", "act", "activation", "gelu_impl", optional=hasattr(mlp, "w1")
        )
        activation = "silu" if function is None else self._activation(function)
        if (together := self.child(mlp, "gate_up_proj", "input_linear", optional=True)) is not None:
            both = self.matrix(together)
            (gate, up), biases = both.weight.chunk(2), (None, None) if both.bias is None else both.bias.chunk(2)
            upper = replace(both, weight=up, bias=biases[1], first_row=len(gate))
            return MLP(replace(both, weight=gate, bias=biases[0]), upper, down, activation)
        gate_proj = self.child(mlp, "gate_proj", "w1", optional=True)
        up_proj = self.child(mlp, "up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "w3")
        own_gate = None if gate_proj is None else self.matrix(gate_proj)
        factors = [float(getattr(mlp, name, 1.0)) for name in ("gate_multiplier", "down_multiplier")]
        return MLP(own_gate, self.matrix(up_proj), down, activation, *factors)

    def _norm_of(self, module: Module, *names: str) -> Norm | None:
        norm = self.child(module, *names, optional=True)
        return None if norm is None else self.norm(norm)

    def norm(self, norm: Module) -> Norm:
        if isinstance(norm, torch.nn.LayerNorm) and norm.weight is not None:
            bias = None if norm.bias is None else self.parameter(norm, "bias").float()
            weight = self.parameter(norm, "weight").float()
            if type(norm).__name__ == "NemotronLayerNorm1P":  # stored minus 1
                weight = weight + 1
            return Norm(weight, bias, norm.eps, subtracts_mean=True)
        if type(norm).__name__ == "OlmoLayerNorm":  # without weights
            sizes: Any = norm.normalized_shape
            return Norm(torch.ones(sizes), None, 1e-5, subtracts_mean=True)
        epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if "Norm" in type(norm).__name__ and isinstance(epsilon, float):
            weight = self.parameter(norm, "weight").float()
            # Some families store the weight minus 1, and some norms subtract the mean. The outputs show which it is.
            plain = Norm(weight, None, epsilon, subtracts_mean=False)
            x = torch.linspace(-1, 2, weight.shape[-1])
            outputs = norm(x.to(self.loaded.dtype)).float()
            kinds = (plain, replace(plain, weight=weight + 1), replace(plain, subtracts_mean=True))
            difference, kind = min((float((kind(x) - outputs).norm()), i) for i, kind in enumerate(kinds))
            if weight.dim() == 1 and difference <= 0.02 * float(outputs.norm()):
                return kinds[kind]
        raise NotKnown(f"it has norms of type {type(norm).__name__}")

    def matrix(self, module: Module) -> Matrix:
        bias = None if getattr(module, "bias", None) is None else self.parameter(module, "bias")
        if type(module).__name__ == "Conv1D":  # GPT-2's linear layers, with their weights the other way round
            return Matrix(self._tensor(module).T.contiguous(), bias, self._names[id(module)])
        weight = self._weights(module)
        if not isinstance(module, torch.nn.Linear):
            raise NotKnown(f"it has matrices of type {type(module).__name__}")
        return Matrix(weight, bias, self._names[id(module)])

    def _activation(self, function: Any) -> str:
        """Return the name of the activation function, which its outputs show."""
        x = torch.linspace(-4, 4, 101)
        with torch.inference_mode():
            expected = function(x)
        for name, known in ACTIVATIONS.items():
            if torch.allclose(known(x), expected, atol=1e-6):
                return name
        raise NotKnown(f"its activation is {type(function).__name__}")

    def _weights(self, module: Module) -> Tensor | Blocks:
        tensor = self._tensor(module)
        found = self._blocks.get(id(module.weight), tensor)
        assert not isinstance(found, list)
        return found

    def _tensor(self, module: Module, name: str = "weight") -> Tensor:
        weight = self.parameter(module, name)
        if weight.dtype != self.loaded.dtype:
            raise NotKnown(f"it has weights in {weight.dtype} beside those in {self.loaded.dtype}")
        return weight

    def parameter(self, module: Module, name: str) -> Tensor:
        parameter = getattr(module, name, None)
        if not isinstance(parameter, Tensor):
            raise NotKnown(f"its {type(module).__name__} has no {name}")
        self._read.add(id(parameter))
        return parameter.detach()

    def child(self, module: Module, *names: str, optional: bool = False) -> Any:
        for name in names:
            if (child := getattr(module, name, None)) is not None:
                return child
        if optional:
            return None
        raise NotKnown(f"its {type(module).__name__} has no {names[0]}")


def _unscaled(norm: Any, width: int) -> Norm:
    """Describe a norm without weights."""
    if getattr(norm, "weight", None) is not None or not isinstance(getattr(norm, "eps", None), float):
        raise NotKnown(f"it has norms of type {type(norm).__name__}")
    return Norm(torch.ones(width), None, norm.eps, subtracts_mean=False)


def _of_pairs(table: Tensor) -> Tensor:
    """Return a table [positions, dim / 2] of cosines or sines, of which most families have each pair's value twice."""
    halves, neighbours = table.float().chunk(2, dim=1), table.float().unflatten(1, (-1, 2)).unbind(2)
    for first, second in (halves, neighbours):
        if torch.equal(first, second):
            return first.contiguous()
    return table.float().contiguous()
