"""Qwen 2 and 3, whose GGUF files transformers reads, and the gated delta nets of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any

import numpy as np

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import NORMS_ADD_ONE, RATES, Change, Order


def _by_key_head(config: Any, name: str) -> Order:
    """Return the rows of Qwen3-Next's projections, sorted by key head: its query, its key, its values, their gates."""
    heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim // heads
    sizes = [heads * key_dim, heads * key_dim, heads * values, heads * values]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([part.reshape(heads, -1) for part in parts], axis=1).reshape(-1)


def _grouped(config: Any, width: int) -> Order:
    """Return `width` numbers of each value head in transformers' order, in which those of a key head are neighbours. In
    a file, the first values of all key heads come first."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    return np.arange(values * width).reshape(values // keys, keys, width).swapaxes(0, 1).reshape(-1)


def _grouped_heads(config: Any, name: str) -> Order:
    return _grouped(config, 1)


def _grouped_values(config: Any, name: str = "") -> Order:
    return _grouped(config, config.linear_value_head_dim)


def _grouped_behind_keys(config: Any, name: str) -> Order:
    before = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return np.concatenate([np.arange(before), before + _grouped_values(config)])


_NORMS = (
    Change(r"linear_attn\.norm\.weight$"),  # the one norm that is as it was
    NORMS_ADD_ONE,
)
_GROUPED = (
    *_NORMS,
    Change(r"linear_attn\.(in_proj_qkv|conv1d)\.weight$", rows=_grouped_behind_keys),
    Change(r"linear_attn\.in_proj_z\.weight$", rows=_grouped_values),
    Change(r"linear_attn\.(in_proj_[ab]\.weight|dt_bias)$", rows=_grouped_heads),
    Change(r"A_log$", rows=_grouped_heads, values="minus exp"),
    Change(r"linear_attn\.out_proj\.weight$", columns=_grouped_values),
)
FAMILIES = (
    Family(type="qwen2", changes=()),
    Family(type="qwen3", changes=()),
    Family(type="qwen2_moe", changes=()),
    Family(type="qwen3_moe", changes=()),
    Family(
        type="qwen3_next",
        changes=(*_NORMS, Change(r"in_proj_qkvz\.weight$", rows=_by_key_head), RATES),
        tensors=((r"in_proj_qkvz\.weight$", (("attn_qkv.weight", "attn_gate.weight"),)),),
    ),
    Family(
        type="qwen3_5_text",
        changes=_GROUPED,
    ),
    Family(
        type="qwen3_5_moe_text",
        changes=_GROUPED,
    ),
)
