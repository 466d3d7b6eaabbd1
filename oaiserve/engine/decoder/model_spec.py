"""Makes the spec of a model, which the rest of the server needs, from its settings and its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from oaiserve.engine.decoder.context_length import context_length
from oaiserve.engine.decoder.description import Decoder
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.spec import KVShape, ModelSpec


def model_spec(
    settings: Settings,
    decoder: Decoder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    generation: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """Return the spec of a model that computes in `dtype`. `generation` is the model's generation_config.json."""
    return ModelSpec(
        name=(settings.get("architectures") or [settings["model_type"]])[0],
        device=device,
        dtype=dtype,
        vocab_size=decoder.head.weight.shape[0],
        max_model_len=context_length(settings),
        eos_token_ids=ids_of(settings.get("eos_token_id")) | ids_of((generation or {}).get("eos_token_id")),
        kv_shapes=kv_shapes(decoder),
        state_shapes=state_shapes(decoder, dtype),
    )


def stored_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype that the settings state for the weights, or float32 if they state none."""
    stated = getattr(torch, str(settings.get("dtype")), None)
    if isinstance(stated, torch.dtype):
        return stated
    return torch.float32


def kv_shapes(decoder: Decoder) -> dict[int, KVShape]:
    """Return the shapes of keys and values by layer, without layers that use another layer's cache."""
    attention = ((number, layer.attention) for number, layer in enumerate(decoder.layers))
    return {number: one.shape for number, one in attention if one is not None and one.cache_of is None}


def ids_of(value: object) -> frozenset[int]:
    """Return the ids of end tokens. A file has one id, a list, or none, which may also be -1. Raises ValueError."""
    ids: list[Any] = value if isinstance(value, list) else [value]
    if any(type(each) is not int for each in ids if each is not None):
        raise ValueError(f"its eos_token_id is {str(value)[:100]!r}, but must be a token id or a list of them")
    return frozenset(each for each in ids if each is not None and each >= 0)
