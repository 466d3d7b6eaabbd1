"""Models whose layers keep states: delta nets, Mamba 2 and short convolutions."""

from __future__ import annotations

import numpy as np

from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.gguf.architecture import NORM_BEFORE_MLP, Architecture, Order
from oaiserve.engine.decoder.sources.gguf.metadata import Fields, Metadata, axes
from oaiserve.engine.decoder.sources.names import Names


def _lfm2(metadata: Metadata) -> Fields:
    """Read the fields of LFM2. Layers with 0 key heads are short convolutions."""
    heads = metadata.of_layers("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_bias": metadata.has(r"shortconv\.in_proj\.bias$"),
        "block_auto_adjust_ff_dim": False,  # The file's width is already adjusted.
        "use_expert_bias": metadata.has(r"exp_probs_b"),
    }


def _mamba2(metadata: Metadata) -> Fields:
    return {
        "state_size": metadata["ssm.state_size"],
        "conv_kernel": metadata["ssm.conv_kernel"],
        "expand": metadata["ssm.inner_size"] // metadata["embedding_length"],
        "layer_norm_epsilon": metadata["attention.layer_norm_rms_epsilon"],
        "use_conv_bias": metadata.has(r"ssm_conv1d\.bias$"),
        "use_bias": metadata.has(r"ssm_(in|out)\.bias$"),
        "num_heads": metadata["ssm.time_step_rank"],
        "head_dim": metadata["ssm.inner_size"] // metadata["ssm.time_step_rank"],
        "n_groups": metadata["ssm.group_count"],
    }


def _delta(metadata: Metadata) -> Fields:
    interval = metadata.get("full_attention_interval", 4)
    heads = metadata["ssm.time_step_rank"]
    keeps_state = metadata.get("attention.recurrent_layers")
    if not isinstance(keeps_state, list):
        keeps_state = [(layer + 1) % interval != 0 for layer in range(metadata.num_layers)]
    of_pairs = axes(metadata) if metadata.get("rope.dimension_sections") else {}  # Qwen3-Next has no sections
    return of_pairs | {
        "layer_types": ["linear_attention" if keeps else "full_attention" for keeps in keeps_state],
        "linear_conv_kernel_dim": metadata["ssm.conv_kernel"],
        "linear_key_head_dim": metadata["ssm.state_size"],
        "linear_num_key_heads": metadata["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": metadata["ssm.inner_size"] // heads,
    }


# These functions return orders that turn a file's rows into the hub's. In files, all queries and keys precede the
# values.
def _by_key_head(settings: Settings) -> Order:
    """Return the rows of Qwen3-Next's projections, sorted by key head: its query, its key, its values, their gates."""
    heads = settings["linear_num_key_heads"]
    key_dim = settings["linear_key_head_dim"]
    values = settings["linear_num_value_heads"] * settings["linear_value_head_dim"] // heads
    sizes = [heads * key_dim, heads * key_dim, heads * values, heads * values]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)


def _grouped(settings: Settings, width: int = 1) -> Order:
    """Return the order that puts the value heads of each key head next to each other. Each has `width` numbers.

    A GGUF file stores the first value head of every key head, then the second value head of every key head, and so on.
    """
    keys = settings["linear_num_key_heads"]
    values = settings["linear_num_value_heads"]
    return np.arange(values * width).reshape(values // keys, keys, width).swapaxes(0, 1).reshape(-1)


def _grouped_values(settings: Settings) -> Order:
    return _grouped(settings, settings["linear_value_head_dim"])


def _grouped_behind_keys(settings: Settings) -> Order:
    before = 2 * settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    return np.concatenate([np.arange(before), before + _grouped_values(settings)])


_GROUPED = {
    **dict.fromkeys(("mixer.qkv", "mixer.conv"), _grouped_behind_keys),
    "mixer.z": _grouped_values,
    **dict.fromkeys(("mixer.a", "mixer.b", "mixer.A_log", "mixer.dt_bias"), _grouped),
}
_LFM2: Names = {
    "final_norm": ("output_norm", "token_embd_norm"),  # newer and older name
    "mixer.in": "shortconv.in_proj",
    "mixer.conv": "shortconv.conv",
    "mixer.out": "shortconv.out_proj",
}
ARCHITECTURES = (
    Architecture(name="mamba2", type="mamba2", fields=_mamba2),
    *(
        Architecture(name=name, type=kind, fields=_lfm2, names=_LFM2)
        for name, kind in (("lfm2", "lfm2"), ("lfm2moe", "lfm2_moe"))
    ),
    Architecture(
        name="qwen3next",
        type="qwen3_next",
        fields=_delta,
        names=NORM_BEFORE_MLP,
        joined={"mixer.qkvz": (("attn_qkv", "attn_gate"),)},
        rows={"mixer.qkvz": _by_key_head},
    ),
    *(
        Architecture(
            name=name,
            type=kind,
            fields=_delta,
            names=NORM_BEFORE_MLP,
            rows=_GROUPED,
            columns={"mixer.out": _grouped_values},
        )
        for name, kind in (("qwen35", "qwen3_5_text"), ("qwen35moe", "qwen3_5_moe_text"))
    ),
)
