"""The interface of paged attention, which backends implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from oaiserve.engine.decoder.description import AttentionParameters, RotaryTable
from oaiserve.engine.model.batch import Batch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest number of an E4M3 float


class LayerCache(NamedTuple):
    """One layer's part of the KV cache, in blocks of tokens."""

    keys: torch.Tensor  # [num_blocks, block_size, kv_heads, key_dim]
    values: torch.Tensor  # [num_blocks, block_size, kv_heads, value_dim]

    @property
    def scales(self) -> tuple[float, float]:
        """Return the factors of stored keys and of stored values."""
        return 1.0, 1.0


class ScaledCache(LayerCache):
    """A layer's part of an 8-bit KV cache (float8_e4m3fn), with one scale for its keys and one for its values."""

    _scales: tuple[float, float]

    @classmethod
    def of(cls, cache: LayerCache, scales: tuple[float, float]) -> ScaledCache:
        made = cls(*cache)
        made._scales = scales
        return made

    @property
    def scales(self) -> tuple[float, float]:
        return self._scales


class Scoring(NamedTuple):
    """How a layer computes scores from queries and keys."""

    scaling: float
    sliding_window: int | None = None  # how many of the latest tokens a token attends to
    softcap: float | None = None  # squashes scores to the range from -softcap to softcap
    sinks: torch.Tensor | None = None  # float32 [heads], scores of an extra key with the value 0, which all tokens see
    looks_ahead: bool = True  # whether tokens see others up to `Batch.last_visible`, or only earlier ones

    @property
    def parameters(self) -> AttentionParameters:
        """Return the parameters without the sinks, as the reference expects them."""
        return AttentionParameters(self.scaling, self.sliding_window, self.softcap, self.looks_ahead)


class Rotation(NamedTuple):
    """How a layer norms and rotates the heads of its queries and keys, for backends that do so. Both are optional."""

    positions: torch.Tensor  # [T] int64, the positions of the step's tokens
    cosines: torch.Tensor | None  # float32 [positions, pairs], or None without a rotation
    sines: torch.Tensor | None
    apart: int  # Number i is rotated with number i + apart. If this is 1, neighbours are pairs.
    query_norm: torch.Tensor | None = None  # float32 [key_dim], the weights of a root mean square norm
    key_norm: torch.Tensor | None = None  # Either both norms are None, or neither is.
    epsilon: float = 0.0

    @property
    def rotary_dim(self) -> int:
        if self.cosines is None:
            return 0
        return 2 * self.cosines.shape[1]


class StepAttention(Protocol):
    """The attention of one step. It is called once per layer, and holds the batch's data for all layers."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, heads, key_dim]
        key: torch.Tensor | None,  # [T, kv_heads, key_dim]
        value: torch.Tensor | None,  # [T, kv_heads, value_dim]
        cache: LayerCache,
        scoring: Scoring,
    ) -> torch.Tensor:  # [T, heads, value_dim]
        """Write the keys and values into the cache, unless an earlier layer with the same cache has done so.

        Then each token attends to its own sequence, up to itself or its `Batch.last_visible`.
        """


# Returns rows int64 [T] of cosines and sines float32 [rows, pairs], by which the step's tokens are rotated.
Angles = Callable[[RotaryTable], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Backend = Callable[[Batch], StepAttention]  # creates the attention of a step
