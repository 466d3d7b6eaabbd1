"""Granite with layers of Mamba 2, with and without experts."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.facts import Facts, Mixture, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.granite_moe import NAMES
from oaiserve.engine.decoder.families.llama import granite
from oaiserve.engine.decoder.families.mamba import names_of_mamba2
from oaiserve.engine.decoder.mixers import mamba2
from oaiserve.engine.decoder.settings import Settings

_WITHOUT_EXPERTS = {"gate_up": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"}


def _facts(settings: Settings) -> Facts:
    has_shared = settings["shared_intermediate_size"] > 0
    mixture = Mixture(top_k=settings["num_experts_per_tok"], has_shared=has_shared)
    rotates = settings["position_embedding_type"] == "rope"
    return replace(
        with_mixers(granite(settings), settings),
        rotates=(rotates,) * settings["num_hidden_layers"],
        mixture=mixture if settings["num_local_experts"] else None,
    )


FAMILIES = (
    Family(
        type="granitemoehybrid",
        facts=_facts,
        other_names={**NAMES, **_WITHOUT_EXPERTS, **names_of_mamba2("mamba")},
        mixer=mamba2,
    ),
)
