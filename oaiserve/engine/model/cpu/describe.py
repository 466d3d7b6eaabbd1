"""Describes a transformers decoder by its operations and weights, found by the names of its modules.

Names can mislead, so two checks come before the description is used: this module checks that the description contains
every parameter of the model, and `start.py` checks that the outputs are the model's own.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.decoder.blocks import Blocks, ExpertBlocks
from oaiserve.engine.decoder.description import (
    MLP,
    Attention,
    AttentionParameters,
    Decoder,
    Experts,
    InputGate,
    LatentProjection,
    Layer,
    LayerInputs,
    Matrix,
    NotKnown,
    RotaryTable,
    by_kind,
)
from oaiserve.engine.decoder.fit import fit
from oaiserve.engine.decoder.key_sizes import with_key_sizes
from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.model.cpu import describe_experts, describe_mixers
from oaiserve.engine.model.cpu.module_reader import ModuleReader, decoder_of, layers_of, unscaled_norm
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.placed_media import padding_id

# The names of norms of queries and keys, and that of the queries' where these come after the rotation.
_QUERY_NORMS, _KEY_NORMS = ("q_norm", "q_layernorm", "query_layernorm"), ("k_norm", "k_layernorm", "key_layernorm")
_AFTER_ROTATION = "query_layernorm"


@torch.inference_mode()
def describe(
    loaded: LoadedModel,
    parameters: dict[int, AttentionParameters],
    blocks: Mapping[str, Blocks | ExpertBlocks] | None = None,
) -> Decoder:
    """Describe the model. `parameters` are those of its attention, by layer index.

    The model's parameters in `blocks`, by name, are described by these in place of their own data: a tensor of all
    experts by the matrices of each. Raises NotKnown.
    """
    return _Description(ModuleReader(loaded, blocks or {}), parameters).decoder()


class _Description:
    """Describes one model, whose layers share tables of rotary embeddings."""

    def __init__(self, reader: ModuleReader, parameters: dict[int, AttentionParameters]) -> None:
        self._reader = reader
        self._loaded = reader.loaded
        self._config = reader.loaded.model.config
        self._base = decoder_of(reader.loaded.model)
        self._family = family_of(self._config.model_type)
        self._parameters = parameters
        self._rotary_tables: dict[str | None, RotaryTable] = {}  # by layer type if tables differ between types

    def decoder(self) -> Decoder:
        reader = self._reader
        if (reason := self._family.no_native_step) is not None:
            raise NotKnown(reason)
        embedding = reader.child(self._base, "embed_tokens", "wte", "embed_in", "embeddings")
        position = reader.child(self._base, "wpe", "embed_positions", optional=True)
        config = self._config
        if any(getattr(one, "clip_qkv", None) for one in (config, getattr(config, "attn_config", None))):
            raise NotKnown("it limits queries, keys and values")
        layers = layers_of(self._loaded.model)
        vector_scale = getattr(config, "embedding_multiplier", 1.0)
        decoder = Decoder(
            embedding=reader.weights(embedding),
            embedding_scale=float(getattr(embedding, "embed_scale", 1)) * vector_scale,
            position_embedding=None if position is None else reader.tensor(position)[getattr(position, "offset", 0) :],
            layer_inputs=self._layer_inputs(),
            layers=[self._layer(index, layer) for index, layer in enumerate(layers)],
            residual_scale=getattr(config, "residual_multiplier", getattr(layers[0], "residual_scale", 1.0)),
            final_norm=reader.norm(
                reader.child(
                    self._base, "norm", "ln_f", "norm_f", "final_layernorm", "final_layer_norm", "embedding_norm"
                )
            ),
            head=reader.matrix(self._loaded.model.get_output_embeddings()),
            logits_scale=getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1.0),
            logits_softcap=getattr(config, "final_logit_softcapping", None) or 0.0,
            vector_scale=vector_scale,
            padding_id=padding_id(config),
            num_deep=getattr(config, "num_deep_layers", 0),
        )
        reader.refuse_unless_all_is_read()
        if not fit(decoder):
            raise NotKnown("the sizes of its matrices do not fit together")
        return replace(decoder, layers=[with_key_sizes(layer) for layer in decoder.layers])

    def _layer_inputs(self) -> LayerInputs | None:
        reader, base = self._reader, self._base
        table = reader.child(base, "embed_tokens_per_layer", optional=True)
        if table is None:
            return None
        norm = reader.norm(reader.child(base, "per_layer_projection_norm"))
        # The projection has a factor before its norm, which is as if the norm had another epsilon.
        factor = float(reader.child(base, "per_layer_model_projection_scale", "per_layer_projection_scale"))
        return LayerInputs(
            table=reader.weights(table),
            table_scale=float(table.embed_scale),
            projection=reader.matrix(reader.child(base, "per_layer_model_projection")),
            norm=replace(norm, epsilon=norm.epsilon / factor**2),
            scale=float(reader.child(base, "per_layer_input_scale")),
        )

    def _layer(self, index: int, layer: Any) -> Layer:
        reader = self._reader
        if not getattr(layer, "do_layer_norm_before", True):
            raise NotKnown("it norms the hidden state itself")
        mixer = None if index not in self._loaded.state_shapes else describe_mixers.mixer(reader, index, layer)
        if hasattr(layer, "norm"):
            return Layer(attention_norm=reader.norm(layer.norm), mixer=mixer)
        attends = mixer is None or index in self._loaded.kv_shapes
        attention = reader.child(layer, "self_attn", "attn", "attention", "self_attention") if attends else None
        attention_norm = reader.norm_of(
            layer, "input_layernorm", "ln_1", "norm_1", "self_attn_layer_norm", "operator_norm"
        )
        after_attention = reader.norm_of(layer, "post_self_attn_layernorm")
        between = reader.norm_of(layer, "post_attention_layernorm", "ln_2", "norm_2", "final_layer_norm")
        before_mlp = reader.norm_of(layer, "pre_feedforward_layernorm", "pre_ff_layernorm", "ffn_norm")
        # `post_attention_layernorm` is the norm before the MLP. If the MLP has its own, or attention has no norm before
        # it, that name is the norm of attention's output.
        if before_mlp is None and attention_norm is not None:
            before_mlp = between
        else:
            after_attention = between
        is_parallel = before_mlp is None and attention_norm is not None
        is_parallel = getattr(layer, "use_parallel_residual", is_parallel)
        beside = reader.child(layer, "shared_mlp", optional=True)
        mlp = (
            layer
            if hasattr(layer, "fc1")
            else reader.child(layer, "mlp", "ffn", "block_sparse_moe", "feed_forward", optional=beside is not None)
        )
        if mlp is None:  # a mixture without experts
            mlp, beside = beside, None
        mlp_out_norm = reader.norm_of(layer, "post_feedforward_layernorm", "post_mlp_layernorm")
        gate = reader.matrix_of(layer, "per_layer_input_gate")
        factor = float(getattr(layer, "layer_scalar", 1.0))
        if factor != 1 and mlp_out_norm is None and gate is None:
            raise NotKnown("its layers scale the hidden state without a norm before")
        return Layer(
            attention_norm=attention_norm,
            attention=None if attention is None else self._attention(index, attention),
            mixer=mixer,
            attention_out_norm=after_attention,
            mlp_norm=attention_norm if is_parallel and before_mlp is None else before_mlp,
            mlp=self._mlp_or_mixture(mlp, beside)
            if getattr(layer, "experts", None) is None
            else describe_experts.mixture_beside(reader, layer, _mlp(reader, mlp)),
            mlp_out_norm=mlp_out_norm,
            is_parallel=is_parallel,
            input_gate=None
            if gate is None
            else InputGate(
                gate=gate,
                activation=reader.activation(reader.child(layer, "act_fn")),
                projection=reader.matrix(reader.child(layer, "per_layer_projection")),
                norm=reader.norm(reader.child(layer, "post_per_layer_input_norm")),
            ),
            factor=factor,
        )

    def _attention(self, index: int, attention: Any) -> Attention:
        reader = self._reader
        attention = reader.child(attention, "attention", optional=True) or attention
        is_sharing = getattr(attention, "is_kv_shared_layer", False)
        owner: int = attention.layer_idx if is_sharing else index  # the layer whose cache it uses
        shape = self._loaded.kv_shapes.get(owner)
        if shape is None or (is_sharing and owner == index):
            raise NotKnown(f"its layer {index} takes its keys and values from another one")
        if getattr(attention, "v_scale", 1.0) != 1:  # MiMo-V2-Flash's
            raise NotKnown("it multiplies its values by a number")
        parameters, values_of_keys = self._parameters[owner], False
        out = reader.matrix(reader.child(attention, "o_proj", "out_proj", "dense", "c_proj"))
        gate: Matrix | None = None
        qkv: list[Matrix] | LatentProjection
        if reader.child(attention, "kv_a_proj_with_mqa", optional=True) is not None:
            if not shape.latent_dim:
                raise NotKnown("its latent vectors have sizes that are no multiples of 16, or that are too large")
            qkv, heads = _latent(reader, attention), shape.kv_heads
        else:
            qkv = [reader.matrix(reader.child(attention, "q_proj"))] if is_sharing else _qkv(reader, attention, shape)
            values_of_keys = len(qkv) == 2
            own_heads = out.weight.shape[1] // shape.value_dim
            if len(qkv) == 3 and len(qkv[0].weight) == 2 * own_heads * shape.key_dim:
                # The query of each head is followed by a gate for the head's output.
                rows = torch.arange(len(qkv[0].weight)).unflatten(0, (own_heads, 2, -1))
                qkv[0], gate = (qkv[0].picked(rows[:, part].flatten()) for part in (0, 1))
            num_rows = sum(len(matrix.weight) for matrix in qkv)
            values = 0 if values_of_keys else shape.value_dim
            of_keys = 0 if is_sharing else shape.kv_heads * (shape.key_dim + values)
            heads, rest = divmod(num_rows - of_keys, shape.key_dim)
            if rest or heads < 1 or heads % shape.kv_heads:
                raise NotKnown(f"its projections have {num_rows} rows, which make no whole heads")
        norms = [reader.norm_of(attention, *names) for names in (_QUERY_NORMS, _KEY_NORMS)]
        return Attention(
            qkv=qkv,
            gate=gate,
            cache_of=owner if is_sharing else None,
            values_of_keys=values_of_keys,
            out=out,
            heads=heads,
            shape=shape,
            query_norm=norms[0],
            key_norm=norms[1],
            value_norm=None
            if (value_norm := getattr(attention, "v_norm", None)) is None
            else unscaled_norm(value_norm, shape.value_dim),
            rotary=self._rotary(index, attention, parameters),
            rotary_offset=attention.qk_nope_head_dim if isinstance(qkv, LatentProjection) else 0,
            rotates_before_norms=hasattr(attention, _AFTER_ROTATION),
            query_factors=self._query_factors,
            sinks=reader.parameter(attention, "sinks").float() if parameters.has_sinks else None,
            parameters=_scaled(parameters, attention),
        )

    def _rotary(self, index: int, attention: Module, parameters: AttentionParameters) -> RotaryTable | None:
        reader = self._reader
        rotary = reader.child(self._base, "rotary_emb", "pos_emb", optional=True)
        is_left_out = self._family.rotates_in_windows and parameters.sliding_window is None
        if rotary is None or is_left_out or not getattr(attention, "use_rope", True):
            return None
        layer_type = None
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            layer_type = self._config.layer_types[index]
        if layer_type not in self._rotary_tables:
            positions = torch.arange(self._loaded.max_model_len)[None]
            tables = rotary(torch.zeros(1), positions, *([] if layer_type is None else [layer_type]))
            if isinstance(tables, Tensor) and tables.is_complex():  # which turns pairs of neighbours
                real, imaginary = torch.view_as_real(tables[0]).float().unbind(-1)
                self._rotary_tables[layer_type] = RotaryTable(real.contiguous(), imaginary.contiguous(), True, 1)
                return self._rotary_tables[layer_type]
            cosines, sines = (_of_pairs(table[0]) for table in tables)
            # Applying the family's `rotate_half` to 0, 1, 2, 3 shows whether neighbours are pairs.
            rotate_half = getattr(sys.modules[type(attention).__module__], "rotate_half", None)
            is_interleaved = rotate_half is not None and rotate_half(torch.arange(4)).tolist() == [-1, 0, -3, 2]
            # Latent attention may have rotated numbers in another order, in queries and keys: their products stay.
            is_interleaved |= bool(getattr(self._config, "rope_interleave", False))
            # Where only the first pairs turn, the tables need no columns for the others.
            apart, turning = cosines.shape[1], (cosines != 1).any(0).nonzero().flatten()
            pairs = int(turning[-1]) + 1 if len(turning) else apart
            cosines, sines = (table[:, :pairs].contiguous() for table in (cosines, sines))
            of_pairs = getattr(self._config, "rope_axes", None)
            axes = None if of_pairs is None else torch.tensor(of_pairs[:pairs], dtype=torch.int32)
            self._rotary_tables[layer_type] = RotaryTable(cosines, sines, is_interleaved, apart, axes)
        return self._rotary_tables[layer_type]

    @cached_property
    def _query_factors(self) -> Tensor | None:
        """The factor of queries at each position, as in Ministral 3."""
        config, positions = self._config, torch.arange(self._loaded.max_model_len)
        rope = getattr(config, "rope_parameters", None) or {}
        if (beta := rope.get("llama_4_scaling_beta")) is None:
            return None
        if getattr(config, "kv_lora_rank", None) is not None:
            raise NotKnown("it scales queries of latent attention by their positions")
        factors: Tensor = 1 + beta * (1 + positions // rope["original_max_position_embeddings"]).float().log()
        return None if bool((factors == 1).all()) else factors

    def _mlp_or_mixture(self, module: Module, beside: Module | None) -> MLP | Experts:
        """Describe an MLP, or a mixture of experts with a shared MLP, within its module or `beside` it."""
        reader = self._reader
        if reader.child(module, "experts", optional=True) is None:
            return _mlp(reader, module)
        shared = reader.child(module, "shared_experts", "shared_expert", "shared_mlp", optional=True) or beside
        return describe_experts.mixture(reader, module, None if shared is None else _mlp(reader, shared))


def _qkv(reader: ModuleReader, attention: Module, shape: KVShape) -> list[Matrix]:
    if (by_head := reader.child(attention, "query_key_value", optional=True)) is not None:
        matrix, heads = reader.matrix(by_head), shape.kv_heads
        parts, rest = divmod(len(matrix.weight), heads * shape.key_dim)
        if isinstance(matrix.weight, Blocks) or rest or shape.key_dim != shape.value_dim:
            raise NotKnown("its projections are sorted by head")
        sorted_rows = matrix.picked(by_kind(torch.arange(len(matrix.weight)), heads, parts))
        return [replace(sorted_rows, module=matrix.module, heads=heads, parts=parts)]
    if (together := reader.child(attention, "qkv_proj", "c_attn", "Wqkv", optional=True)) is not None:
        return [reader.matrix(together)]
    names = ["q_proj", "k_proj", "v_proj"]
    if getattr(attention, "use_alternative_attention", False):  # whose values are its keys
        names.remove("v_proj")
    return [reader.matrix(reader.child(attention, name)) for name in names]


def _latent(reader: ModuleReader, attention: Any) -> LatentProjection:
    query_down = reader.matrix_of(attention, "q_a_proj")
    found = LatentProjection(
        query_down=query_down,
        query_norm=reader.norm_of(attention, "q_a_layernorm"),
        query=reader.matrix(reader.child(attention, "q_proj" if query_down is None else "q_b_proj")),
        down=reader.matrix(reader.child(attention, "kv_a_proj_with_mqa")),
        norm=reader.norm(reader.child(attention, "kv_a_layernorm")),
        up=reader.matrix(reader.child(attention, "kv_b_proj")),
    )
    if found.up.bias is not None:
        raise NotKnown("its keys and values are made from latent vectors with a bias")
    return found


def _scaled(parameters: AttentionParameters, attention: Any) -> AttentionParameters:
    """Return the parameters for queries as they are, where a layer has scaled them itself."""
    own = float(getattr(attention, "scaling", 1.0))
    return replace(parameters, scaling=own) if parameters.scaling == 1 else parameters


def _mlp(reader: ModuleReader, mlp: Module) -> MLP:
    down = reader.matrix(reader.child(mlp, "down_proj", "c_proj", "fc2", "dense_4h_to_h", "output_linear", "w2"))
    function = reader.child(
        mlp, "act_fn", "activation_fn", "act", "activation", "gelu_impl", optional=hasattr(mlp, "w1")
    )
    activation = "silu" if function is None else reader.activation(function)
    if (together := reader.child(mlp, "gate_up_proj", "input_linear", optional=True)) is not None:
        both = reader.matrix(together)
        (gate, up), biases = both.weight.chunk(2), (None, None) if both.bias is None else both.bias.chunk(2)
        upper = replace(both, weight=up, bias=biases[1], first_row=len(gate))
        return MLP(replace(both, weight=gate, bias=biases[0]), upper, down, activation)
    up_proj = reader.child(mlp, "up_proj", "c_fc", "fc1", "dense_h_to_4h", "w3")
    return MLP(reader.matrix_of(mlp, "gate_proj", "w1"), reader.matrix(up_proj), down, activation)


def _of_pairs(table: Tensor) -> Tensor:
    """Return a table [positions, dim / 2] of cosines or sines, of which most families have each pair's value twice."""
    halves, neighbours = table.float().chunk(2, dim=1), table.float().unflatten(1, (-1, 2)).unbind(2)
    for first, second in (halves, neighbours):
        if torch.equal(first, second):
            return first.contiguous()
    return table.float().contiguous()
