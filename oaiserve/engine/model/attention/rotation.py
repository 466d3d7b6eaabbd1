"""The norms of queries and keys before attention, and their rotation by position, for backends that compute these."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """The norm of each head of a layer's queries and keys, if any, and then its rotation, if any."""

    positions: Tensor  # [T] int64, the positions of the step's tokens
    cosines: Tensor | None  # float32 [positions, pairs], or None without a rotation
    sines: Tensor | None
    apart: int  # Number i is rotated with number i + apart. If this is 1, neighbours are pairs.
    query_norm: Tensor | None = None  # float32 [key_dim], the weights of a root mean square norm
    key_norm: Tensor | None = None  # Either both norms are None, or neither is.
    epsilon: float = 0.0

    @property
    def rotary_dim(self) -> int:
        if self.cosines is None:
            return 0
        return 2 * self.cosines.shape[1]
