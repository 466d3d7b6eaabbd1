"""Granite with experts. The experts of a layer share tensors."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, Mixture
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.llama import granite, granite_swa
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
    return replace(granite(settings), mixture=_mixture(settings))


def _granitemoeshared(settings: Settings) -> Facts:
    return replace(granite(settings), mixture=_shared(settings))


def _granitemoe_swa(settings: Settings) -> Facts:
    return replace(granite_swa(settings), mixture=_shared(settings))


def _mixture(settings: Settings) -> Mixture:
    return Mixture(num_experts=settings["num_local_experts"], top_k=settings["num_experts_per_tok"])


def _shared(settings: Settings) -> Mixture:
    return replace(_mixture(settings), has_shared=settings["shared_intermediate_size"] > 0)


FAMILIES = (
    Family(type="granitemoe", facts=_granitemoe, other_names=NAMES),
    Family(type="granitemoeshared", facts=_granitemoeshared, other_names=NAMES),
    Family(type="granitemoe_swa", facts=_granitemoe_swa, other_names=NAMES),
)
