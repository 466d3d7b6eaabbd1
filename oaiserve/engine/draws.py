"""The random numbers behind sampling: pure functions of a seed, a choice and a position. Stdlib only.

There is no state. So a draw does not depend on the rest of the batch, and a sequence that was preempted and computed
again draws the same tokens.
"""

from __future__ import annotations

_MASK64 = (1 << 64) - 1


def draw_key(seed: int, choice: int) -> int:
    """Return the key of one choice of a prompt: 64 bits, which are unrelated for any two choices or seeds."""
    return _splitmix64(seed & _MASK64, choice)


def uniform(key: int, position: int) -> float:
    """Return the random number in [0, 1) for the token at `position` of the sequence with that key."""
    return (_splitmix64(key, position) >> 11) * 2.0**-53


def _splitmix64(key: int, index: int) -> int:
    """Return output number `index` of the generator with seed `key` (Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators")."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
