"""What a loaded model is: its weights, its limits, and what its KV cache keeps of each token. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values that one layer keeps of one token: `kv_heads` of `key_dim` and of `value_dim` numbers."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def numel(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on the device. If the model is split over processes, this is one part of it."""

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    vocab_size: int  # rows of the output embedding; may exceed the tokenizer's
    max_model_len: int  # tokens the positions are good for
    eos_token_ids: frozenset[int]
    default_params: dict[str, float | int]
    kv_shapes: dict[int, KVShape]  # by layer index

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.numel for shape in self.kv_shapes.values()) * self.dtype.itemsize
