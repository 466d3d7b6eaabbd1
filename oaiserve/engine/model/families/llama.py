"""Llama, Mistral and Mixtral, whose GGUF files transformers reads, and Llama 4."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.families.family import Family
from oaiserve.engine.model.families.gguf_changes import TURNED
from oaiserve.engine.model.families.own_attention import Handed
from oaiserve.engine.model.families.small_sizes import EXPERTS


def _query_factors(config: Any, positions: Tensor) -> Tensor:
    """Return the factors of queries by position, in layers without rotation, float32."""
    factors: Tensor = ((positions.float() + 1) / config.floor_scale).floor().log1p() * config.attn_scale + 1
    return factors


def _tune_by_positions(attention: Any, model: Any, handed: Handed) -> bool:
    """Make Llama 4 scale queries by their positions, and return whether it does.

    Its own code counts from the first token of a step, which may be that of another sequence. Models whose factors are
    1 within the first attention chunk, as all published ones', do not scale.
    """
    is_tuned = attention.attn_temperature_tuning and not attention.use_rope
    attention.attn_temperature_tuning = False
    config = model.config
    if not is_tuned or bool((_query_factors(config, torch.arange(config.attention_chunk_size - 1)) == 1).all()):
        return False

    def scale(_: Module, __: Any, queries: Tensor) -> Tensor:
        return (queries * _query_factors(config, handed.positions)[None, :, None]).to(queries.dtype)

    attention.q_proj.register_forward_hook(scale)
    return True


_SMALL = {"num_local_experts": 4, "intermediate_size_mlp": 96, "no_rope_layer_interval": 2}
FAMILIES = (
    *(Family(type=name, changes=(TURNED,)) for name in ("llama", "mistral")),
    Family(type="mixtral", changes=(TURNED,), small=EXPERTS),
    Family(type="llama4_text", attention={"Llama4TextAttention": _tune_by_positions}, small=_SMALL),
)
