"""Places a description on a device in the dtype of the reference executor, and creates its KV cache."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Decoder, LayerInputs, Matrix, NotKnown, Router
from oaiserve.engine.decoder.spec import KVShape
from oaiserve.engine.model.attention import FP8, LayerCache, ScaledCache
from oaiserve.engine.model.kv_cache import zeroed


def new_cache(
    shape: KVShape, dtype: torch.dtype, device: torch.device, *, num_blocks: int, block_size: int
) -> LayerCache:
    """Return the cache of one layer, filled with zeros.

    A latent vector is stored as a token's only key. Raises NotKnown for keys and values in integers, whose layout only
    native code supports.
    """
    if shape.is_int8:
        raise NotKnown("its KV cache has integers of eight bits")
    tokens = (num_blocks, block_size)
    if shape.latent_dim:
        return LayerCache(
            zeroed((*tokens, 1, shape.latent_dim), dtype, device),
            torch.empty(num_blocks, 0, dtype=dtype, device=device),
        )
    dtype = dtype if shape.scales is None else FP8
    cache = LayerCache(
        zeroed((*tokens, shape.kv_heads, shape.key_dim), dtype, device),
        zeroed((*tokens, shape.kv_heads, shape.value_dim), dtype, device),
    )
    if shape.scales is None:
        return cache
    return ScaledCache.of(cache, shape.scales)


def placed(decoder: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the decoder with its tensors on the device, and weights of matrices and embeddings in the dtype.

    Blocks are expanded, and shared tensors stay shared.
    """
    on_device: Decoder = Placing(dtype, device).part(decoder)
    return on_device


def expanded(weight: Tensor | Blocks, dtype: torch.dtype) -> Tensor:
    """Return the weights of a matrix on the host as a tensor, with blocks expanded in the dtype."""
    if isinstance(weight, Blocks):
        return weight.expand(dtype)
    return weight


class Placing:
    """Places the parts of one description, each tensor once. The description must live as long as this object."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        # Tensors whose dtype changes, by class. Routers stay in float32, so that rounding doesn't change their choice.
        self._dtypes: dict[type, dict[str, torch.dtype]] = {
            Decoder: {"embedding": dtype, "position_embedding": dtype},
            LayerInputs: {"table": dtype},
            Matrix: {"weight": dtype},
            Router: {"weight": torch.float32},
        }
        self._tensors: dict[object, Tensor] = {}  # keyed by the identity of the original tensor and the dtype

    def part(self, part: Any, dtype: torch.dtype | None = None) -> Any:
        """Return a part of a description on the device. A tensor is also converted to the dtype."""
        if isinstance(part, Tensor | Blocks):
            return self._tensor(part, dtype)
        if isinstance(part, list):
            return [self.part(one) for one in part]
        if not is_dataclass(part) or isinstance(part, type):
            return part
        dtypes = self._dtypes.get(type(part), {})
        values = {field.name: getattr(part, field.name) for field in fields(part)}
        return replace(part, **{name: self.part(value, dtypes.get(name)) for name, value in values.items()})

    def _tensor(self, part: Tensor | Blocks, dtype: torch.dtype | None) -> Tensor:
        if isinstance(part, Blocks):
            assert dtype is not None
            key: object = (id(part), dtype)
            if key not in self._tensors:
                self._tensors[key] = part.expand(dtype).to(self.device)
        else:  # Two tensors may share memory, such as an embedding and a tied head.
            key = (part.data_ptr() or id(part), part.shape, part.stride(), part.dtype, dtype)
            if key not in self._tensors:
                self._tensors[key] = part.to(self.device, dtype or part.dtype)
        return self._tensors[key]
