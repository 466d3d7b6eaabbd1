"""Llama 4: expert weights multiply the inputs of experts; layers rotate and attend in chunks, or do neither."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, refuse_other_types
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES: Names = {
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "router": "feed_forward.router",
    "experts.gate_up": "feed_forward.experts.gate_up_proj",
    "experts.down": "feed_forward.experts.down_proj",
    "shared.gate": "feed_forward.shared_expert.gate_proj",
    "shared.up": "feed_forward.shared_expert.up_proj",
    "shared.down": "feed_forward.shared_expert.down_proj",
}


def _llama4(settings: Settings) -> Facts:
    refuse_other_types(settings, "full_attention", "chunked_attention")
    have_experts = settings["moe_layers"]
    return replace(
        llama(settings),
        chunks=_chunks(settings),
        rotates=tuple(bool(rotates) for rotates in settings["no_rope_layers"]),
        rotates_before_norms=settings["use_qk_norm"],
        has_weightless_qk_norms=settings["use_qk_norm"],
        factors_are_for_unrotated=True,
        mixture=Mixture(
            layers=tuple(number in have_experts for number in range(settings["num_hidden_layers"])),
            num_experts=settings["num_local_experts"],
            top_k=settings["num_experts_per_tok"],
            is_sigmoid=True,
            renormalizes=False,
            is_router_adaptable=True,
            has_shared=True,
            scales_inputs=True,
        ),
    )


def _chunks(settings: Settings) -> tuple[int | None, ...]:
    kinds = settings["layer_types"]
    size = settings["attention_chunk_size"]
    if "chunked_attention" in kinds and not size:
        raise NotKnown(f"its layers attend in chunks of {size} tokens")
    return tuple(size if kind == "chunked_attention" else None for kind in kinds)


FAMILIES = (Family(type="llama4_text", facts=_llama4, other_names=_NAMES, has_transposed_experts=True),)
