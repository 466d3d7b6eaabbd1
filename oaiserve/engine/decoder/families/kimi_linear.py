"""Kimi Linear: delta nets with a decay for each row of a state, latent attention, and experts like DeepSeek V3's."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.experts import by_mlp_types, grouped_mixture
from oaiserve.engine.decoder.facts import Facts, llama, with_mixers
from oaiserve.engine.decoder.families.deepseek import latent_sizes
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.softmax_experts import MIXTRAL
from oaiserve.engine.decoder.mixers import kimi_delta_net
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.settings_by_type import KIMI_LINEAR_KEYS
from oaiserve.engine.decoder.sources.names import LLAMA, Names

_OF_DELTA_NETS = {*KIMI_LINEAR_KEYS.values(), "full_attn_layers", "kda_layers"}
_FORGET_GATE = {"decay_down": "f_a_proj", "decay_up": "f_b_proj", "A_log": "A_log", "dt_bias": "dt_bias"}
_MIXER = {
    **{role: f"{role}_proj" for role in ("q", "k", "v", "b")},
    **{f"conv_{role}": f"{role}_conv1d" for role in ("q", "k", "v")},
    "conv": "conv1d",
    "gate_down": "g_a_proj",
    "gate_up": "g_b_proj",
    "norm": "o_norm",
    "out": "o_proj",
}
_NAMES: Names = {
    # transformers writes files in which the MLPs of all layers are named like experts.
    **{
        role: (name, name.replace("mlp.", "block_sparse_moe."))
        for role, name in LLAMA.items()
        if isinstance(name, str) and name.startswith("mlp.")
    },
    **MIXTRAL,
    **{f"mixer.{role}": f"self_attn.{name}" for role, name in _MIXER.items()},
    **{f"mixer.{role}": (f"self_attn.forget_gate.{name}", f"self_attn.{name}") for role, name in _FORGET_GATE.items()},
}


def _facts(settings: Settings) -> Facts:
    if others := sorted(settings.get("linear_attn_config", {}).keys() - _OF_DELTA_NETS):
        raise NotKnown(f"its linear_attn_config has {others[0]}")
    if not settings.get("mla_use_nope", True):
        raise NotKnown("its attention rotates queries and keys")
    function = settings.get("moe_router_activation_func", "sigmoid")
    if function != "sigmoid":
        raise NotKnown(f"its routers have the activation {function}")
    mixture = grouped_mixture(settings, by_mlp_types(settings), settings["num_local_experts"])
    facts = replace(
        llama(settings),
        scaling=settings["qk_head_dim"] ** -0.5,
        rotates=(False,) * len(settings["layer_types"]),
        is_tied=False,  # regardless of its settings
        latent=latent_sizes(settings),
        mixture=replace(mixture, has_shared=settings["num_shared_experts"] > 0),
    )
    return with_mixers(facts, settings)


FAMILIES = (Family(type="kimi_linear", facts=_facts, other_names=_NAMES, mixer=kimi_delta_net),)
