"""DeepSeek V2 and V3: keys and values of latent vectors. GLM-4.7 Flash and Kimi K2 have the same GGUF files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import Change


def _of_latent(config: Any, name: str, tensors: Sequence[Tensor]) -> Tensor:
    """Join the projections from latent vectors to keys and values.

    Most files have two tensors with a matrix for each head, that of keys the other way round."""
    if len(tensors) == 1:
        return tensors[0]
    keys, values = tensors
    return torch.cat([keys.mT, values], dim=1).flatten(0, 1)


_CHANGES = (Change(r"kv_b_proj\.weight$", joined=_of_latent),)
_TENSORS = ((r"kv_b_proj\.weight$", (("attn_k_b.weight", "attn_v_b.weight"), ("attn_kv_b.weight",))),)
FAMILIES = (
    Family(type="deepseek_v2", changes=_CHANGES, tensors=_TENSORS),
    Family(type="deepseek_v3", changes=_CHANGES, tensors=_TENSORS),
)
