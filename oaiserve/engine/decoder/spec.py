"""A model as the server sees it, without weights: its limits, and the shapes of its layers' caches and states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from oaiserve.config import KVCacheDtype

KEY_GROUP = 32  # At most this many numbers of an 8-bit key share a scale.
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values that one layer stores per token: their shape, and how they are stored."""

    kv_heads: int
    key_dim: int
    value_dim: int
    is_int8: bool = False  # False: stored in the model's dtype, or with scales
    # The factors by which a GPU multiplies keys and values in 8-bit floats when it reads them.
    scales: tuple[float, float] | None = None
    latent_dim: int = 0  # numbers cached instead of keys and values, which all heads compute from them; 0: none

    def num_bytes(self, dtype: torch.dtype) -> int:
        if self.latent_dim:
            return self.latent_dim * dtype.itemsize
        numbers = self.kv_heads * (self.key_dim + self.value_dim)
        if self.scales is not None:
            return numbers
        if not self.is_int8:
            return numbers * dtype.itemsize
        # one scale for each group of a key, and one for the value
        scales = self.kv_heads * (-(-self.key_dim // KEY_GROUP) + 1)
        return numbers + scales * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one tensor of a layer's state. It doesn't depend on the length of the sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerStateShapes:
    """The shapes of one layer's state per sequence, instead of keys and values or in addition to them."""

    conv: StateShape  # the last inputs of its convolution: [channels, kernel size]
    recurrent: StateShape | None

    @property
    def num_bytes(self) -> int:
        return sum(state.num_bytes for state in (self.conv, self.recurrent) if state is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and settings of a model that the server needs."""

    name: str  # name of its class in transformers
    device: torch.device
    dtype: torch.dtype
    vocab_size: int  # rows of the output embedding; may exceed the tokenizer's
    max_model_len: int  # the most tokens of a sequence, prompt and answer together
    eos_token_ids: frozenset[int]
    kv_shapes: dict[int, KVShape]  # keyed by layer index
    state_shapes: dict[int, LayerStateShapes] = field(default_factory=dict)  # shapes for the layers that keep a state

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.num_bytes(self.dtype) for shape in self.kv_shapes.values())

    def with_cache(self, dtype: KVCacheDtype) -> Self:
        scales = (1.0, 1.0) if dtype == "fp8" else None
        shapes = {
            layer: replace(shape, is_int8=dtype == "int8", scales=scales) for layer, shape in self.kv_shapes.items()
        }
        return replace(self, kv_shapes=shapes)

    def with_scales(self, scales: dict[int, tuple[float, float]]) -> Self:
        """Return the spec with these scales of an 8-bit float KV cache, by layer."""
        shapes = {layer: replace(shape, scales=scales[layer]) for layer, shape in self.kv_shapes.items()}
        return replace(self, kv_shapes=shapes)

    def with_latent_cache(self, latent_dim: int) -> Self:
        """Return the spec with a cache of this many numbers per token in each layer. 0: a cache of keys and values."""
        shapes = {layer: replace(shape, latent_dim=latent_dim) for layer, shape in self.kv_shapes.items()}
        return replace(self, kv_shapes=shapes)

    @property
    def has_float8_cache(self) -> bool:
        return any(shape.scales is not None for shape in self.kv_shapes.values())

    @property
    def has_latent_cache(self) -> bool:
        return any(shape.latent_dim for shape in self.kv_shapes.values())

    @property
    def state_bytes(self) -> int:
        return sum(shapes.num_bytes for shapes in self.state_shapes.values())
