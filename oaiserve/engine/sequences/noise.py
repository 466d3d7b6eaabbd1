"""The random noise behind sampling: pure functions of a seed, a choice, a position and a token id. Stdlib only.

A token is drawn by the Gumbel-max trick: each id has a score, which is its logit divided by the temperature, plus noise
of the standard Gumbel distribution. The id with the highest score is drawn, so each id is drawn with its probability. A
draw is a comparison of scores and needs no sum of probabilities. Logits whose last bits differ give the same id, unless
the two best scores are as close as that.

There is no state: a draw does not depend on the rest of the batch, on preemptions, or on drafts.

This file is the definition. `numpy_sampling` and `triton_sampling` compute the same for whole rows.
"""

from __future__ import annotations

from math import log, log1p
from typing import Any

_MASK32 = (1 << 32) - 1
_MASK64 = (1 << 64) - 1
# Odd factors for a 32-bit hash in which nearly every bit of the input changes each bit of the output with probability
# 1/2 (Wellons, "Hash Function Prospector").
FACTOR_1 = 0x7FEB352D
FACTOR_2 = 0x846CA68B
# Random bits in the noise of an id. With 52, the largest noise is 53 ln 2 = 36.7, enough to draw ids with a probability
# of 1e-16. With 24 it would be 17, and ids below 1e-7 would be drawn too rarely. Large vocabularies have many of these.
NOISE_BITS = 52


def draw_key(seed: int, choice: int) -> int:
    """Return the key of one choice of a prompt: 64 bits that are unrelated to those of any other choice or seed."""
    key: int = splitmix64(seed & _MASK64, choice)
    return key


def noise_seed(key: int, position: int) -> int:
    """Return the 64 bits that the noise of all ids depends on, for the token at `position` of the sequence with that
    key."""
    seed: int = splitmix64(key, position)
    return seed


def noise_bits(seed: int, token_id: int) -> int:
    """Return 64 random bits for an id. For each id, they are a permutation of the seeds, so none is favoured.

    Seeds are random already, and the ids are mixed once for all draws, so there is little work per id and draw.
    Sampling computes the upper half for all ids, and the lower half only for candidates for the best score.
    """
    first = seed >> 32
    second = seed & _MASK32
    mixed = mix32(token_id)
    high = (mixed ^ first) * FACTOR_1 & _MASK32
    high = ((high ^ high >> 15) + second) * FACTOR_2 & _MASK32
    high ^= high >> 16
    return high << 32 | mix32((high + mixed & _MASK32) ^ second)


def noise(seed: int, token_id: int) -> float:
    """Return the noise of an id, -log(-log(u)) for a random u between 0 and 1.

    Large noise needs a u close to 1, so 1 - u is made from the random bits: it can be as small as 2**-53.
    """
    rest = ((noise_bits(seed, token_id) >> 64 - NOISE_BITS) + 0.5) * 2.0**-NOISE_BITS
    return -log(-log1p(-rest))


def mix32(x: int) -> int:
    """Return a permutation of the 32-bit numbers that maps neighbouring `x` to unrelated results."""
    x ^= x >> 16
    x = x * FACTOR_1 & _MASK32
    x ^= x >> 15
    x = x * FACTOR_2 & _MASK32
    return x ^ x >> 16


def splitmix64(key: Any, index: Any) -> Any:
    """Return output number `index` of the generator SplitMix64 with seed `key` (Steele, Lea and Flood 2014).

    Both are integers, or both are arrays of uint64."""
    z = (key + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)
