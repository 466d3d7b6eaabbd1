"""Older families that compute attention by themselves: Bloom, Falcon and GPT-J.

Each gets a function that calls paged attention instead, with the slopes of ALiBi's biases where it has them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.own_attention import Handed

if TYPE_CHECKING:
    from torch.nn import Module
    from transformers import PreTrainedModel


def attend(module: Module, handed: Handed, query: Tensor, key: Tensor, value: Tensor, **scoring: Any) -> Tensor:
    """Return the result [1, T, heads, dim] for query, key and value [1, heads, T, dim]."""
    from oaiserve.engine.model.attention.hook import paged_attention  # imports transformers

    return paged_attention(module, query, key, value, None, call=handed.call, **scoring)[0]


def slopes_of(alibi: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the slopes [heads] of the biases [heads, 1, 2] of two neighbouring keys."""
    biases = alibi.flatten(1).float()
    return (biases[:, 1] - biases[:, 0]).to(model.device)


def no_biases(*_: Any, **__: Any) -> None:
    """Compute no biases in place of a model's own function: its attention no longer reads them."""


def _bloom(module: Any, model: Any, handed: Handed) -> bool:
    build = type(model.transformer).build_alibi_tensor
    slopes = slopes_of(build(model.transformer, torch.ones(1, 2), module.num_heads, torch.float32), model)
    model.transformer.build_alibi_tensor = no_biases

    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        query, key, value = module._reshape(module.query_key_value(hidden_states))
        out = attend(module, handed, query, key, value, scaling=module.inv_norm_factor, slopes=slopes)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward
    return True


def _falcon(module: Any, model: Any, handed: Handed) -> bool:
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


def _gptj(module: Any, _: Any, handed: Handed) -> bool:
    def own(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        out = attend(module, handed, query.to(value.dtype), key.to(value.dtype), value)
        return out.transpose(1, 2), None

    module._attn = own
    return True


_SMALL_GPTJ = {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8}
FAMILIES = (
    Family(type="bloom", attention={"BloomAttention": _bloom}, computes_attention=True),
    Family(type="falcon", attention={"FalconAttention": _falcon}, computes_attention=True, small={"head_dim": None}),
    Family(type="gptj", attention={"GPTJAttention": _gptj}, computes_attention=True, small=_SMALL_GPTJ),
)
