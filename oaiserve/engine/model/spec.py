"""The data of a model: its limits, the shape of its KV cache, and transformers' model with its weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of the keys and values that one layer keeps of one token."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one tensor that a layer keeps of a sequence, however long that is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerStateShapes:
    """The shapes of what one layer keeps of a sequence in place of keys and values, or beside these."""

    conv: StateShape | None  # the last inputs of its convolution: [channels, kernel size]
    recurrent: StateShape | None

    @property
    def num_bytes(self) -> int:
        return sum(state.num_bytes for state in (self.conv, self.recurrent) if state is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and settings of a model that serving needs to know, apart from its weights."""

    name: str  # of its class in transformers
    device: torch.device
    dtype: torch.dtype
    vocab_size: int  # rows of the output embedding; may exceed the tokenizer's
    max_model_len: int  # the most tokens of a sequence, prompt and answer together
    eos_token_ids: frozenset[int]
    default_params: dict[str, float | int]  # of requests, from the model's generation_config.json
    kv_shapes: dict[int, KVShape]  # by layer index
    state_shapes: dict[int, LayerStateShapes] = field(default_factory=dict)  # of layers that keep a state

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.numel for shape in self.kv_shapes.values()) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """The bytes of the state of one sequence, in all layers."""
        return sum(shapes.num_bytes for shapes in self.state_shapes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelSpec):
    """A model with its weights on the device, or the part of it that this process has if the model is split."""

    model: PreTrainedModel
