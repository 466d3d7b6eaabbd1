"""Gemma 4: wide heads in layers of full attention, shared caches, per-layer inputs, and experts next to an MLP."""

from __future__ import annotations

from dataclasses import replace

import torch

from oaiserve.engine.decoder.dense import Rotary
from oaiserve.engine.decoder.description import (
    Attention,
    AttentionParameters,
    Experts,
    InputGate,
    Layer,
    LayerInputs,
    MixtureNorms,
    Norm,
    NotKnown,
)
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_by_type
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names
from oaiserve.engine.decoder.spec import KVShape

_MLP = {role: f"mlp.{role}_proj" for role in ("gate", "up", "down")}
NAMES: Names = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
    "factor": "layer_scalar",
    "layer_embedding": "model.embed_tokens_per_layer",
    "layer_projection": "model.per_layer_model_projection",
    "layer_projection_norm": "model.per_layer_projection_norm",
    "input_gate": "per_layer_input_gate",
    "input_projection": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
    **{f"shared.{role}": name for role, name in _MLP.items()},
    "shared_out_norm": "post_feedforward_layernorm_1",
    "router": "router.proj",
    "router_scale": "router.scale",
    "router_factors": "router.per_expert_scale",
    "experts.gate_up": "experts.gate_up_proj",
    "experts.down": "experts.down_proj",
    "experts_norm": "pre_feedforward_layernorm_2",
    "experts_out_norm": "post_feedforward_layernorm_2",
}


def _facts(settings: Settings) -> Facts:
    if settings["use_bidirectional_attention"] == "all":
        raise NotKnown("its tokens see those behind them")
    mixture = None
    if settings.get("enable_moe_block", False):
        mixture = Mixture(top_k=settings["top_k_experts"], is_router_adaptable=True, has_shared=True)
    return replace(common_facts(settings), mixture=mixture)


def common_facts(settings: Settings) -> Facts:
    """Return the facts that Gemma 3n and Gemma 4 share."""
    return replace(
        llama(settings, function="hidden_activation"),
        scaling=1.0,
        windows=windows_by_type(settings),
        embedding_scale=settings["hidden_size"] ** 0.5,
        rounds_embedding_scale=True,
        logits_softcap=settings["final_logit_softcapping"] or 0.0,
    )


def _attention(reader: Reader, facts: Facts, settings: Settings, rotary: Rotary, number: int) -> Attention:
    """Describe a layer's attention in Gemma 4. Only layers with a window let an image's tokens see its later ones."""
    attention = shared_attention(reader, facts, settings, rotary, number)
    looks_ahead = attention.parameters.sliding_window is not None
    return replace(attention, parameters=replace(attention.parameters, looks_ahead=looks_ahead))


def shared_attention(reader: Reader, facts: Facts, settings: Settings, rotary: Rotary, number: int) -> Attention:
    """Describe the attention of a layer that may use another layer's keys and values."""
    is_full = settings["layer_types"][number] == "full_attention"
    if is_full:
        kv_heads = settings.get("num_global_key_value_heads", facts.kv_heads)
        head_dim = settings.get("global_head_dim", facts.head_dim)
    else:
        kv_heads = facts.kv_heads
        head_dim = facts.head_dim
    owner = _owner(settings, number)
    values_of_keys = owner is None and is_full and settings.get("attention_k_eq_v", False)
    roles = ["q"]
    if owner is None:
        roles += ["k"] if values_of_keys else ["k", "v"]
    else:
        for role in ("k", "v", "k_norm"):  # Files may contain these tensors anyway.
            reader.leave_out(role)
    qkv = [reader.matrix(role) for role in roles]
    rows = [heads * head_dim for heads in (facts.heads, kv_heads, kv_heads)][: len(roles)]
    if [len(matrix.weight) for matrix in qkv] != rows:
        raise NotKnown(f"its projections do not have {rows} rows")
    return Attention(
        qkv=qkv,
        cache_of=owner,
        values_of_keys=values_of_keys,
        out=reader.matrix("out"),
        heads=facts.heads,
        shape=KVShape(kv_heads, head_dim, head_dim),
        query_norm=reader.norm("q_norm", facts.norm),
        key_norm=reader.norm("k_norm", facts.norm) if owner is None else None,
        value_norm=Norm(torch.ones(head_dim, dtype=torch.float32), None, facts.norm.epsilon, False)
        if owner is None
        else None,
        rotary=rotary.of_layer(number),
        parameters=AttentionParameters(facts.scaling, facts.windows[number], None),
    )


def _owner(settings: Settings, number: int) -> int | None:
    """Return the layer whose keys and values a layer shares: the last unshared one of its type. None means its own."""
    kinds = settings["layer_types"]
    first_sharing = len(kinds) - settings["num_kv_shared_layers"]
    if number < first_sharing:
        return None
    owners = [other for other in range(first_sharing) if kinds[other] == kinds[number]]
    if not owners:
        raise NotKnown(f"its layer {number} has no keys and values, and none before it of the same type has")
    return owners[-1]


def _with_factor(layer: Layer, reader: Reader, _facts: Facts, _settings: Settings) -> Layer:
    factor = reader.numbers_or_none("factor")
    if factor is None:
        return layer
    return replace(layer, factor=float(factor))


def _adjust(layer: Layer, reader: Reader, facts: Facts, settings: Settings) -> Layer:
    """Add the factor of a layer, the gate of its per-layer inputs, and the norms and factors of its experts."""
    layer = _with_factor(layer, reader, facts, settings)
    if isinstance(layer.mlp, Experts):
        layer = replace(layer, mlp=_with_norms(layer.mlp, reader, facts, settings))
    if not settings["hidden_size_per_layer_input"]:
        return layer
    return replace(layer, input_gate=input_gate(reader, facts))


def input_gate(reader: Reader, facts: Facts) -> InputGate:
    return InputGate(
        gate=reader.matrix("input_gate"),
        activation=facts.activation,
        projection=reader.matrix("input_projection"),
        norm=reader.norm("input_norm", facts.norm),
    )


def _with_norms(experts: Experts, reader: Reader, facts: Facts, settings: Settings) -> Experts:
    router_scale = reader.numbers("router_scale") * settings["hidden_size"] ** -0.5
    norms = MixtureNorms(
        router=Norm(router_scale, None, facts.norm.epsilon, False),
        experts=reader.norm("experts_norm", facts.norm),
        experts_out=reader.norm("experts_out_norm", facts.norm),
        shared_out=reader.norm("shared_out_norm", facts.norm),
    )
    return replace(experts, router=replace(experts.router, factors=reader.numbers("router_factors")), norms=norms)


def layer_inputs(reader: Reader, facts: Facts, settings: Settings) -> LayerInputs | None:
    """Describe the per-layer inputs, if the model has any."""
    numbers = settings["hidden_size_per_layer_input"]
    if not numbers:
        return None
    norm = reader.norm("layer_projection_norm", facts.norm)
    table = reader.matrix("layer_embedding").weight
    if len(table) != (rows := settings["vocab_size_per_layer_input"]):
        raise NotKnown(f"its embedding of layers has {len(table)} rows, and not {rows}")
    # The projection's factor precedes its norm, so it has the same effect as another epsilon of that norm.
    factor = settings["hidden_size"] ** -0.5
    return LayerInputs(
        table=table,
        table_scale=float(torch.tensor(numbers**0.5, dtype=reader.tensors.dtype)),
        projection=reader.matrix("layer_projection"),
        norm=replace(norm, epsilon=norm.epsilon / factor**2),
        scale=2.0**-0.5,
    )


FAMILIES = (
    Family(
        type="gemma4_text",
        facts=_facts,
        other_names=NAMES,
        attention=_attention,
        adjust=_adjust,
        layer_inputs=layer_inputs,
    ),
    Family(
        type="gemma4_unified_text",
        facts=_facts,
        other_names=NAMES,
        attention=shared_attention,
        adjust=_with_factor,
    ),
)
