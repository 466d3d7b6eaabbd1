"""Falcon: attention that it computes by itself, with rotary embeddings or with the biases of ALiBi."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed, attend, slopes_of


def _attention(module: Any, model: Any, handed: Handed) -> bool:
    code = sys.modules[type(module).__module__]
    # The new architecture repeats each key head for its query heads.
    repeats = module.num_heads // module.num_kv_heads if module.new_decoder_architecture else 1
    slopes = None
    if model.config.alibi:
        biases = code.build_alibi_tensor(torch.ones(1, 2), module.num_heads, torch.float32)
        slopes = slopes_of(biases, model) * module.inv_norm_factor
        model.transformer.use_alibi = False  # its biases would be those of one sequence

    def forward(
        hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any
    ) -> tuple[Tensor, None]:
        query, key, value = module._split_heads(module.query_key_value(hidden_states))
        heads_first = (query, key[:, :, ::repeats], value[:, :, ::repeats])
        query, key, value = (tensor.transpose(1, 2) for tensor in heads_first)
        if slopes is None:
            query, key = code.apply_rotary_pos_emb(query, key, *position_embeddings)
        out = attend(module, handed, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
        return module.dense(out.flatten(2)), None

    module.forward = forward
    return True


FAMILIES = (
    Family(type="falcon", attention={"FalconAttention": _attention}, computes_attention=True, small={"head_dim": None}),
)
