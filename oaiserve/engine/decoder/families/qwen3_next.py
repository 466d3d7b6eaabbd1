"""Qwen3-Next and Qwen 3.5: delta nets in most layers, and attention with gates in the others."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, Mixture, llama, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.softmax_experts import QWEN, qwen_mixture
from oaiserve.engine.decoder.mixers import delta_net
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES: Names = {
    **QWEN,
    **{f"mixer.{role}": f"linear_attn.in_proj_{role}" for role in ("qkvz", "ba", "qkv", "z", "b", "a")},
    **{f"mixer.{role}": f"linear_attn.{role}" for role in ("A_log", "dt_bias", "norm")},
    "mixer.conv": "linear_attn.conv1d",
    "mixer.out": "linear_attn.out_proj",
}


def _facts(settings: Settings) -> Facts:
    facts = with_mixers(llama(settings), settings)
    return replace(facts, norm=replace(facts.norm, adds_one=True), has_attention_gates=True)


def _qwen3_next(settings: Settings) -> Facts:
    mixture = replace(qwen_mixture(settings), has_shared=True, has_shared_gate=True)
    return replace(_facts(settings), mixture=mixture if settings["num_experts"] else None)


def _qwen3_5_moe(settings: Settings) -> Facts:
    mixture = Mixture(top_k=settings["num_experts_per_tok"], has_shared=True, has_shared_gate=True)
    return replace(_facts(settings), mixture=mixture)


FAMILIES = (
    Family(type="qwen3_next", facts=_qwen3_next, other_names=_NAMES, mixer=delta_net),
    Family(type="qwen3_5_text", facts=_facts, other_names=_NAMES, mixer=delta_net),
    Family(type="qwen3_5_moe_text", facts=_qwen3_5_moe, other_names=_NAMES, mixer=delta_net),
)
