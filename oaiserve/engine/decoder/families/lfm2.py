"""LFM2: short convolutions in place of attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, Mixture, layers_of_type, llama
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.mixers import short_convolution
from oaiserve.engine.decoder.settings import Settings

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
_OF_EXPERTS = {
    "router": "feed_forward.gate",
    "choice_bias": "feed_forward.expert_bias",
    "experts.gate_up": "feed_forward.experts.gate_up_proj",
    "experts.down": "feed_forward.experts.down_proj",
    "experts.{}.gate": "feed_forward.experts.{}.w1",
    "experts.{}.up": "feed_forward.experts.{}.w3",
    "experts.{}.down": "feed_forward.experts.{}.w2",
}


def _lfm2(settings: Settings) -> Facts:
    facts = llama(settings, epsilon="norm_eps", function=None)
    return replace(facts, mixing_layers=layers_of_type(settings, "conv"))


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


FAMILIES = (
    Family(type="lfm2", facts=_lfm2, other_names=_NAMES, mixer=short_convolution),
    Family(type="lfm2_moe", facts=_with_experts, other_names={**_NAMES, **_OF_EXPERTS}, mixer=short_convolution),
)
