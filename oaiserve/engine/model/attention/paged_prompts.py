"""Attention of long prompts by FlashAttention, which reads the blocks of the cache in place."""

from __future__ import annotations

from collections.abc import Callable

import torch

from oaiserve.engine.model.attention import FP8, LayerCache, Scoring
from oaiserve.engine.model.batch import Batch

Attend = Callable[..., torch.Tensor]  # as torch.nn.attention.varlen.varlen_attn
LEAST_TOKENS = 1024  # Fewer prompt tokens in a step are left to the Triton kernel, as in captured steps.


class PagedPrompts:
    """The attention of the prompts of one step, which follow its decodes."""

    def __init__(self, attend: Attend, batch: Batch) -> None:
        first = batch.num_decodes
        self._attend = attend
        self._first = first
        starts = batch.query_start[first:] - first
        most = max(batch.query_lens[first:]), max(batch.context_lens[first:])
        self._prompts = starts.int(), None, *most
        self._keys = {"seqused_k": batch.seq_lens[first:].int(), "block_table": batch.own_tables()[first:].int()}

    def __call__(self, query: torch.Tensor, cache: LayerCache, out: torch.Tensor, scoring: Scoring) -> None:
        """Write the rows of prompts into `out` [T, heads, dim]. Their keys and values must be in the cache already."""
        before = (scoring.sliding_window or 0) - 1  # -1: all
        how = {"scale": scoring.scaling, "window_size": (before, 0), "enable_gqa": True}
        first = self._first
        out[first:] = self._attend(query[first:], *cache, *self._prompts, **how, **self._keys)


def paged_prompts(attend: Attend | None, batch: Batch, least_tokens: int = LEAST_TOKENS) -> PagedPrompts | None:
    """Return the attention of a step's prompts, or None if they are short or some tokens see later ones."""
    if attend is None or batch.last_visible is not None:
        return None
    if sum(batch.query_lens[batch.num_decodes :]) <= least_tokens:
        return None
    return PagedPrompts(attend, batch)


def takes_layer(cache: LayerCache, scoring: Scoring) -> bool:
    """Return whether FlashAttention supports such a layer."""
    has_its_cache = cache.keys.dtype != FP8 and cache.keys.shape == cache.values.shape
    return has_its_cache and scoring.softcap is None and scoring.sinks is None
