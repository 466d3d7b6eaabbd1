"""Mamba 2, and Bamba, which has attention instead in some layers."""

from __future__ import annotations

from functools import partial

from oaiserve.engine.decoder.facts import Facts, llama, with_mixers
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.mixers import mamba2
from oaiserve.engine.decoder.reader import NormKind
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import Names

_KEYS = ("num_heads", "head_dim", "n_groups", "state_size")  # settings under Mamba 2's own names


def names_of_mamba2(module: str) -> Names:
    parts = {"in": "in_proj", "conv": "conv1d", "norm": "norm", "out": "out_proj"}
    parts |= {name: name for name in ("A_log", "dt_bias", "D")}
    return {f"mixer.{role}": f"{module}.{name}" for role, name in parts.items()}


def _mamba2(settings: Settings) -> Facts:
    num_layers = settings["num_hidden_layers"]
    return Facts(
        num_layers=num_layers,
        heads=0,  # it has no attention heads
        kv_heads=0,
        head_dim=0,
        norm=NormKind(epsilon=settings["layer_norm_epsilon"]),
        activation="silu",
        scaling=1.0,
        windows=(None,) * num_layers,
        rotates=(False,) * num_layers,
        with_mixer=frozenset(range(num_layers)),
        without_attention=frozenset(range(num_layers)),
        without_mlp=frozenset(range(num_layers)),
        is_tied=settings["tie_word_embeddings"],
    )


def _bamba(settings: Settings) -> Facts:
    return with_mixers(llama(settings), settings)


FAMILIES = (
    Family(
        type="mamba2",
        facts=_mamba2,
        other_names={
            "embedding": "backbone.embeddings",
            "layers.{}": "backbone.layers.{}",
            "final_norm": "backbone.norm_f",
            "attention_norm": "norm",
            **names_of_mamba2("mixer"),
        },
        mixer=partial(mamba2, keys=_KEYS),
    ),
    Family(
        type="bamba",
        facts=_bamba,
        other_names={
            "final_norm": "model.final_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            "gate": "feed_forward.gate_proj",
            "up": "feed_forward.up_proj",
            "down": "feed_forward.down_proj",
            **names_of_mamba2("mamba"),
        },
        mixer=mamba2,
    ),
)
