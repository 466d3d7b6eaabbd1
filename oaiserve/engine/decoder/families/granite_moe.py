"""Granite with experts, which share tensors in a layer, and with layers of Mamba 2."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, Mixture, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.llama import granite, granite_swa
from oaiserve.engine.decoder.families.mamba import names_of_mamba2
from oaiserve.engine.decoder.mixers import mamba2
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES: Names = {
    "router": ("block_sparse_moe.router", "block_sparse_moe.router.layer"),
    "experts.gate_up": ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear"),
    "experts.down": ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear"),
    "shared.gate_up": "shared_mlp.input_linear",
    "shared.down": "shared_mlp.output_linear",
}
_HYBRID_NAMES: Names = {
    **_NAMES,
    # In models without experts, the shared MLP is the only MLP of a layer.
    "gate_up": "shared_mlp.input_linear",
    "down": "shared_mlp.output_linear",
    **names_of_mamba2("mamba"),
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


def _hybrid(settings: Settings) -> Facts:
    has_shared = settings["shared_intermediate_size"] > 0
    mixture = Mixture(top_k=settings["num_experts_per_tok"], has_shared=has_shared)
    rotates = settings["position_embedding_type"] == "rope"
    return replace(
        with_mixers(granite(settings), settings),
        rotates=(rotates,) * settings["num_hidden_layers"],
        mixture=mixture if settings["num_local_experts"] else None,
    )


FAMILIES = (
    Family(type="granitemoe", facts=_granitemoe, other_names=_NAMES),
    Family(type="granitemoeshared", facts=_granitemoeshared, other_names=_NAMES),
    Family(type="granitemoe_swa", facts=_granitemoe_swa, other_names=_NAMES),
    Family(type="granitemoehybrid", facts=_hybrid, other_names=_HYBRID_NAMES, mixer=mamba2),
)
