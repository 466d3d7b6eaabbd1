"""LFM2 and LFM3: most layers have a short convolution instead of attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from oaiserve.engine.decoder.description import Layer, NotKnown
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_by_type, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.mixers import short_convolution
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES = {
    "final_norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "out": "self_attn.out_proj",
    "mixer.in": "conv.in_proj",
    "mixer.conv": "conv.conv",
    "mixer.out": "conv.out_proj",
    "mlp_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_OF_LFM3: Names = {
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "out": "self_attn.o_proj",
    "gate_of_heads": ("self_attn.g_proj", "self_attn.gate_proj"),
    "attention_out_norm": "post_operator_norm",
    "mlp_out_norm": "post_ffn_norm",
}
_OF_EXPERTS = {
    "router": "feed_forward.gate",
    "choice_bias": "feed_forward.expert_bias",
    "experts.gate_up": "feed_forward.experts.gate_up_proj",
    "experts.down": "feed_forward.experts.down_proj",
    "experts.{}.gate": "feed_forward.experts.{}.w1",
    "experts.{}.up": "feed_forward.experts.{}.w3",
    "experts.{}.down": "feed_forward.experts.{}.w2",
}


def _lfm2(settings: Settings, *others: str) -> Facts:
    return with_mixers(llama(settings, epsilon="norm_eps", function=None), settings, "conv", *others)


def _with_experts(settings: Settings) -> Facts:
    mixture = Mixture(
        layers=tuple(number >= settings["num_dense_layers"] for number in range(settings["num_hidden_layers"])),
        top_k=settings["num_experts_per_tok"],
        is_sigmoid=True,
        has_choice_bias=settings["use_expert_bias"],
        has_float32_bias=True,
        renormalizes=settings["norm_topk_prob"],
        scale=settings["routed_scaling_factor"],
    )
    return replace(_lfm2(settings), mixture=mixture)


def _lfm3(settings: Settings) -> Facts:
    return replace(_lfm2(settings, "sliding_attention"), windows=windows_by_type(settings, "conv"))


def _with_gate(layer: Layer, reader: Reader, facts: Facts, settings: Settings) -> Layer:
    """Add attention's gate. It has only one number per head, so its rows are repeated for all numbers of the head."""
    if (layer.attention_out_norm is not None) != settings["use_sandwich_norm"]:
        raise NotKnown("its files and its use_sandwich_norm disagree")
    if layer.attention is None or not settings["use_attention_gate"]:
        return layer
    gate = reader.matrix("gate_of_heads")
    if len(gate.weight) != facts.heads:
        raise NotKnown(f"its gates are those of {len(gate.weight)} heads, and it has {facts.heads}")
    rows = torch.arange(facts.heads).repeat_interleave(facts.head_dim)
    return replace(layer, attention=replace(layer.attention, gate=gate.picked(rows)))


FAMILIES = (
    Family(type="lfm2", facts=_lfm2, other_names=_NAMES, mixer=short_convolution),
    Family(type="lfm2_moe", facts=_with_experts, other_names={**_NAMES, **_OF_EXPERTS}, mixer=short_convolution),
    Family(
        type="lfm3",
        facts=_lfm3,
        other_names={**_NAMES, **_OF_LFM3},
        mixer=short_convolution,
        adjust=_with_gate,
    ),
)
