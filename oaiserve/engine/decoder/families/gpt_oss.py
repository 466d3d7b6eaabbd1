"""gpt-oss: sinks, and experts with biases and a clamped gate."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import ClampedGate
from oaiserve.engine.decoder.facts import Facts, Mixture, llama, windows_by_type
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.settings import Settings


def _gpt_oss(settings: Settings) -> Facts:
    mixture = Mixture(
        num_experts=settings["num_local_experts"],
        top_k=settings["num_experts_per_tok"],
        is_in_turns=True,
        activation=ClampedGate(settings["swiglu_alpha"], settings["swiglu_limit"]),
    )
    return replace(llama(settings), windows=windows_by_type(settings), mixture=mixture)


FAMILIES = (Family(type="gpt_oss", facts=_gpt_oss, other_names={"router": "mlp.router"}, has_transposed_experts=True),)
