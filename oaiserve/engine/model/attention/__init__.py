"""Attention over the paged KV cache: one function, `(q, k, v, layer cache, batch, ...) -> out`, one file per backend.

transformers' modelling code calls `paged_attention` under the name `ATTENTION`; the batch and the caches travel to it
as keyword arguments of the model's forward, so nothing here is global but the registered name.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from oaiserve.config import Attention
from oaiserve.engine.model.batch import Batch
from oaiserve.errors import StartupError

ATTENTION = "oaiserve_paged"


class LayerCache(NamedTuple):
    """One layer's part of the cache, in blocks of tokens. A backend may have another layout within a block."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, key_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, value_dim]


class Backend(Protocol):
    def __call__(
        self,
        query: torch.Tensor,  # [T, heads, key_dim]
        key: torch.Tensor,  # [T, kv_heads, key_dim]
        value: torch.Tensor,  # [T, kv_heads, value_dim]
        cache: LayerCache,
        batch: Batch,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:  # [T, heads, value_dim]
        """Writes the step's keys and values into the cache, then lets each token attend to its own sequence up to
        itself: to the last `sliding_window` tokens where given, scores squashed to (-softcap, softcap) where given."""


def select_backend(device: torch.device, name: Attention = "auto") -> Backend:
    """`auto`: the fastest that every model can have there. Raises StartupError for one that the device, or what is
    installed, does not support."""
    has_triton = find_spec("triton") is not None
    if name == "auto":
        name = "triton" if device.type == "cuda" and has_triton else "reference"
    if name == "reference":
        from oaiserve.engine.model.attention import reference

        return reference.attend
    if device.type != "cuda":
        raise StartupError(f"--attention {name} is for NVIDIA GPUs; the model is on {device}. Use --attention auto.")
    if not has_triton:
        raise StartupError(f"--attention {name} needs the package triton. Install it, or use --attention reference.")
    if name == "varlen":
        from oaiserve.engine.model.attention import varlen

        return varlen.attend
    from oaiserve.engine.model.attention import triton

    return triton.attend


class AttentionCall(NamedTuple):
    """What the attention of every layer needs beside its own tensors."""

    backend: Backend
    caches: dict[int, LayerCache]  # by layer index
    batch: Batch


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, key_dim]
    key: torch.Tensor,  # [1, kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    *,
    call: AttentionCall,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """In the shape of transformers' attention functions. The mask is not used: causality, windows and sequence bounds
    follow from the batch."""
    out = call.backend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        call.caches[module.layer_idx],  # type: ignore[index]
        call.batch,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, paged_attention)
