"""Attention among the texts of one step, which follow each other in one row, without padding and without a cache.

transformers looks up `packed_attention` by its registered name, `PACKED`. It gets the texts' lengths as a keyword
argument of the model's forward.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "oaiserve_packed"
BAND_TOKENS = 256  # queries that share a mask, in layers whose tokens see only their neighbourhood

Runs = list[tuple[int, int]]  # (number of texts, tokens of each), in the order of the row


def runs_of(lengths: list[int]) -> Runs:
    """Return the runs of texts of equal length, which are computed together."""
    return [(len(list(equal)), length) for length, equal in groupby(lengths)]


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, key_dim]
    key: torch.Tensor,  # [1, kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    runs: Runs,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a layer's attention text by text, with the signature of transformers' attention functions.

    The mask is not used. A causal layer has an attribute of its own. With `sliding_window`, a token sees only tokens
    that are less than this far away.
    """
    if softcap is not None:
        raise TypeError("packed attention has no softcap")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    heads = query.shape[1]
    kv_heads = key.shape[1]
    if kv_heads != heads:
        key, value = (states.repeat_interleave(heads // kv_heads, dim=1) for states in (key, value))
    out = query.new_empty(1, query.shape[2], heads, value.shape[-1])
    start = 0
    for number, length in runs:
        end = start + number * length
        # [number, heads, length, dim], without a copy
        q, k, v = (
            states[0, :, start:end].unflatten(1, (number, length)).transpose(0, 1) for states in (query, key, value)
        )
        if sliding_window is not None and length > sliding_window:
            attended = _in_bands(q, k, v, scaling, sliding_window, causal=causal)
        else:
            attended = scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1, scale=scaling)
        out[0, start:end] = attended.transpose(1, 2).flatten(0, 1)
        start = end
    return out, None


def _in_bands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, window: int, *, causal: bool
) -> torch.Tensor:
    """Attend to tokens less than `window` away. The time grows with the length, not with its square."""
    length = query.shape[2]
    parts = []
    for first in range(0, length, BAND_TOKENS):
        last = min(first + BAND_TOKENS, length)
        low = max(0, first - window + 1)
        high = last if causal else min(length, last + window - 1)
        distance = (
            torch.arange(first, last, device=query.device)[:, None] - torch.arange(low, high, device=query.device)[None]
        )
        mask = (distance < window) & (distance >= 0 if causal else distance > -window)
        parts.append(
            scaled_dot_product_attention(
                query[:, :, first:last], key[:, :, low:high], value[:, :, low:high], attn_mask=mask, scale=scaling
            )
        )
    return torch.cat(parts, dim=2)


AttentionInterface.register(PACKED, packed_attention)
