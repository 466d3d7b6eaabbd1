"""Rendezvous hashing: for each key, every router finds the same order of replicas.

The order of a key is that of the replicas' scores for it. If a replica leaves or joins, only the keys with it in the
first place move.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_ALL_BITS = (1 << 64) - 1
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64's last steps


def seed_of(name: str) -> int:
    """Return 64 bits for a replica."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def score(key: int, seed: int) -> int:
    """Return the score of one replica for a key. Two replicas with different seeds never have the same."""
    bits = key ^ seed
    bits = (bits ^ bits >> 30) * _FACTORS[0] & _ALL_BITS
    bits = (bits ^ bits >> 27) * _FACTORS[1] & _ALL_BITS
    return bits ^ bits >> 31


def order(key: int, seeds: npt.NDArray[np.uint64]) -> list[int]:
    """Return the positions of all seeds, the one with the highest score first."""
    bits = seeds ^ np.uint64(key)
    bits = (bits ^ bits >> np.uint64(30)) * np.uint64(_FACTORS[0])
    bits = (bits ^ bits >> np.uint64(27)) * np.uint64(_FACTORS[1])
    bits ^= bits >> np.uint64(31)
    positions: list[int] = np.argsort(~bits).tolist()
    return positions
