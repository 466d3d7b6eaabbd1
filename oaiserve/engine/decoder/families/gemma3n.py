"""Gemma 3n: several hidden states per token, low-rank residual paths, sparse MLPs, shared caches, per-layer inputs."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import AltUp, HiddenStates, Laurel, Layer, LowRank, NotKnown
from oaiserve.engine.decoder.facts import Facts
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.gemma4 import NAMES, common_facts, input_gate, layer_inputs, shared_attention
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_NAMES: Names = {
    **NAMES,
    "hidden_projections.{}": "model.altup_projections.{}",
    "hidden_unprojections.{}": "model.altup_unembed_projections.{}",
    "altup_norm": "altup.router_norm",
    "altup_router": "altup.modality_router",
    "altup_predictions": "altup.prediction_coefs",
    "altup_corrections": "altup.correction_coefs",
    "altup_scale": "altup.correct_output_scale",
    "laurel_down": "laurel.linear_left",
    "laurel_up": "laurel.linear_right",
    "laurel_norm": "laurel.post_laurel_norm",
}


def _facts(settings: Settings) -> Facts:
    if not settings["hidden_size_per_layer_input"]:
        raise NotKnown("its layers have no inputs of their own")
    return replace(common_facts(settings), gate_sparsity=tuple(settings["activation_sparsity_pattern"]))


def _hidden_states(reader: Reader, settings: Settings) -> HiddenStates:
    others = range(settings["altup_num_inputs"] - 1)
    return HiddenStates(
        projections=[reader.matrix(f"hidden_projections.{number}") for number in others],
        unprojections=[reader.matrix(f"hidden_unprojections.{number}") for number in others],
        active=settings["altup_active_idx"],
    )


def _adjust(layer: Layer, reader: Reader, facts: Facts, settings: Settings) -> Layer:
    norm = reader.norm("altup_norm", facts.norm)
    scale = reader.numbers("altup_scale")
    altup = AltUp(
        norm=replace(norm, weight=norm.weight / settings["hidden_size"]),
        router=reader.matrix("altup_router"),
        predictions=reader.matrix("altup_predictions"),
        corrections=reader.matrix("altup_corrections"),
        scale=scale if settings["altup_correct_scale"] else None,
    )
    product = LowRank(reader.matrix("laurel_down"), reader.matrix("laurel_up"))
    return replace(
        layer,
        laurel=Laurel(product, reader.norm("laurel_norm", facts.norm)),
        altup=altup,
        input_gate=input_gate(reader, facts),
    )


FAMILIES = (
    Family(
        type="gemma3n_text",
        facts=_facts,
        other_names=_NAMES,
        attention=shared_attention,
        adjust=_adjust,
        layer_inputs=layer_inputs,
        hidden_states=_hidden_states,
    ),
)
