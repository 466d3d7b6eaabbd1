"""Granite with experts, whose tensors have those of a layer together."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.experts import in_all_layers
from oaiserve.engine.decoder.facts import Facts, Mixture
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.llama import granite
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

NAMES: Names = {
    "router": ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
    "experts.gate_up": ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear"),
    "experts.down": ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear"),
    "shared.gate_up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
}


def _granitemoe(settings: Settings) -> Facts:
    mixture = Mixture(
        layers=in_all_layers(settings),
        top_k=settings["num_experts_per_tok"],
        has_shared=settings.get("shared_intermediate_size", 0) > 0,
    )
    return replace(granite(settings), mixture=mixture)


FAMILIES = tuple(Family(type=name, facts=_granitemoe, other_names=NAMES) for name in ("granitemoe", "granitemoeshared"))
