"""Bloom: attention with the biases of ALiBi, which it computes by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend, no_biases, slopes_of


def _attention(module: Any, model: Any, handed: Handed) -> bool:
    build = type(model.transformer).build_alibi_tensor
    slopes = slopes_of(build(model.transformer, torch.ones(1, 2), module.num_heads, torch.float32), model)
    model.transformer.build_alibi_tensor = no_biases

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        out = attend(module, handed, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward
    return True


FAMILIES = (Family(type="bloom", attention={"BloomAttention": _attention}, computes_attention=True),)
