"""The norms of queries and keys before attention, and their rotation by position.

A backend that does this where it reads them gets a `Rotation`. Here it is in plain torch, for all others.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [T, heads, key_dim] and keys, normed and rotated in plain torch."""
        return self._turned(query, self.query_norm), self._turned(key, self.key_norm)

    def _turned(self, heads: Tensor, norm: Tensor | None) -> Tensor:
        x = heads.float()
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, norm.shape, norm, self.epsilon)
        if self.cosines is None or self.sines is None:
            return x.to(heads.dtype)
        pairs = self.cosines.shape[1]
        step = 2 if self.apart == 1 else 1
        first = slice(0, step * pairs, step)
        second = slice(self.apart, self.apart + step * pairs, step)
        cosines, sines = (table[self.positions][:, None] for table in (self.cosines, self.sines))
        out = x.clone()
        out[..., first] = x[..., first] * cosines - x[..., second] * sines
        out[..., second] = x[..., second] * cosines + x[..., first] * sines
        return out.to(heads.dtype)
