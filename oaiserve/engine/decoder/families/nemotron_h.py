"""Nemotron-H: each layer is a Mamba 2 mixer, attention, an MLP or experts, with one norm before it."""

from __future__ import annotations

import math
from dataclasses import replace

from oaiserve.engine.decoder.description import Layer, Mamba2, NotKnown
from oaiserve.engine.decoder.experts import grouped_mixture
from oaiserve.engine.decoder.facts import Facts, layers_of_type, llama, refuse_other_types
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.mamba import names_of_mamba2
from oaiserve.engine.decoder.mixers import mamba2
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_KINDS = {"linear_attention", "full_attention", "mlp", "moe"}
_KEYS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
_MLP = {role: f"{role}_proj" for role in ("up", "down")}
_NAMES: Names = {
    "embedding": ("model.embeddings", "backbone.embeddings"),
    "layers.{}": ("model.layers.{}", "backbone.layers.{}"),
    "final_norm": ("model.norm_f", "backbone.norm_f"),
    "attention_norm": "norm",
    "mlp_norm": (),
    **{role: f"mixer.{role}_proj" for role in ("q", "k", "v")},
    "out": "mixer.o_proj",
    **names_of_mamba2("mixer"),
    **{role: f"mixer.{name}" for role, name in _MLP.items()},
    **{f"shared.{role}": f"mixer.shared_experts.{name}" for role, name in _MLP.items()},
    **{f"experts.{role}": f"mixer.experts.{name}" for role, name in _MLP.items()},
    **{f"experts.{{}}.{role}": f"mixer.experts.{{}}.{name}" for role, name in _MLP.items()},
    "router": "mixer.gate",
    "choice_bias": "mixer.gate.e_score_correction_bias",
}


def _facts(settings: Settings) -> Facts:
    refuse_other_types(settings, *_KINDS)
    kinds = settings["layer_types"]
    if settings["moe_latent_size"] is not None and "moe" in kinds:
        raise NotKnown("its experts read vectors of their own")
    mixing = layers_of_type(settings, "linear_attention")
    attending = layers_of_type(settings, "full_attention")
    mixture = grouped_mixture(settings, tuple(kind == "moe" for kind in kinds), settings["n_routed_experts"])
    return replace(
        llama(settings, epsilon="layer_norm_epsilon", function="mlp_hidden_act"),
        rotates=(False,) * len(kinds),
        with_mixer=mixing,
        without_attention=frozenset(range(len(kinds))) - attending,
        without_mlp=mixing | attending,
        is_tied=False,  # regardless of its settings
        mixture=replace(mixture, has_gates=False),
    )


def _mixer(reader: Reader, facts: Facts, settings: Settings) -> Mamba2:
    limits = (settings["time_step_min"], math.inf)
    return mamba2(reader, facts, settings, keys=_KEYS, function="mamba_hidden_act", limits=limits)


def _with_norm(layer: Layer, _reader: Reader, _facts: Facts, _settings: Settings) -> Layer:
    """Move the norm of a layer to its MLP if it has one."""
    if layer.mlp is None:
        return layer
    return replace(layer, attention_norm=None, mlp_norm=layer.attention_norm)


FAMILIES = (Family(type="nemotron_h", facts=_facts, other_names=_NAMES, mixer=_mixer, adjust=_with_norm),)
