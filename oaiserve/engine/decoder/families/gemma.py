"""Gemma without per-layer inputs: its norms store their weights minus 1, and it scales and ties its embedding."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.facts import Facts, llama, windows_by_type
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_FOUR_NORMS: Names = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def _gemma(settings: Settings, function: str = "hidden_act") -> Facts:
    settings.read.add("use_bidirectional_attention")  # used by PaliGemma, and only for images
    facts = llama(settings, function=function)
    return replace(
        facts,
        norm=replace(facts.norm, adds_one=True),
        embedding_scale=settings["hidden_size"] ** 0.5,
        rounds_embedding_scale=True,
    )


def _with_windows(settings: Settings) -> Facts:
    return replace(
        _gemma(settings, "hidden_activation"),
        scaling=settings["query_pre_attn_scalar"] ** -0.5,
        windows=windows_by_type(settings),
        logits_softcap=settings["final_logit_softcapping"] or 0.0,
    )


def _gemma2(settings: Settings) -> Facts:
    return replace(_with_windows(settings), softcap=settings["attn_logit_softcapping"])


def _gemma3(settings: Settings) -> Facts:
    if settings["use_bidirectional_attention"]:
        raise NotKnown("its tokens see those behind them")
    return _with_windows(settings)


FAMILIES = (
    Family(type="gemma", facts=_gemma),
    Family(type="gemma2", facts=_gemma2, other_names=_FOUR_NORMS),
    Family(type="gemma3_text", facts=_gemma3, other_names=_FOUR_NORMS),
    Family(type="vaultgemma", facts=_gemma2, other_names={"mlp_norm": "pre_feedforward_layernorm"}),
)
