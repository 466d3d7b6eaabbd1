"""The norms of queries and keys before attention, and their rotation by position, for backends that compute these."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rotation(NamedTuple):
    """A layer norms each head of its queries and keys in this way, if it does, and then rotates it, if it does."""

    positions: Tensor  # [T] int64, of the step's tokens
    cosines: Tensor | None  # float32 [positions, pairs]; None: nothing is rotated
    sines: Tensor | None
    apart: int  # number i is rotated with number i + apart; 1: with its neighbour, in pairs
    query_norm: Tensor | None = None  # float32 [key_dim], the weights of a root mean square norm
    key_norm: Tensor | None = None  # there are both or none
    epsilon: float = 0.0

    @property
    def rotary_dim(self) -> int:
        """Return how many numbers of each head are rotated."""
        return 0 if self.cosines is None else 2 * self.cosines.shape[1]
