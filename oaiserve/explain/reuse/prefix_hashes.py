"""Hashes of the prefixes of a prompt's tokens: two prompts have as many tokens in common as they have equal hashes.

The hash of a prefix is the sum of one pseudorandom number for each token and position, which depends on a secret key of
this process. So nobody can recover the tokens without that key, and a prompt of 8,000 tokens is hashed in well under a
millisecond.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from secrets import randbits

import numpy as np

_KEY = np.uint64(randbits(64) | 1)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 divided by the golden ratio: it spreads neighbouring numbers
_HALF = np.uint64(32)

PrefixHashes = np.ndarray  # uint32 [number of tokens]; entry i is the hash of the first i + 1 tokens


def prefix_hashes(token_ids: Sequence[int]) -> PrefixHashes:
    """Return the hash of each prefix of the tokens, uint32 [number of tokens]."""
    # NumPy takes three times as long to read a list. The id may be negative where there is no real token.
    numbers = np.frombuffer(array("q", token_ids), np.uint64)
    mixed = np.arange(1, len(numbers) + 1, dtype=np.uint64)
    mixed *= _MIX
    mixed += numbers
    mixed *= _KEY
    mixed ^= mixed >> _HALF
    mixed *= _MIX
    mixed ^= mixed >> _HALF
    mixed *= _KEY
    np.cumsum(mixed, out=mixed)
    mixed >>= _HALF
    return mixed.astype(np.uint32)


def num_common(first: PrefixHashes, second: PrefixHashes) -> int:
    """Return how many tokens two prompts have in common at their beginning."""
    length = min(len(first), len(second))
    return bisect_left(range(length), True, key=lambda index: bool(first[index] != second[index]))
