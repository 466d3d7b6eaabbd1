"""`LostPrefix`: the part of a prompt that was in the prefix cache and can no longer be used."""

from __future__ import annotations

from typing import NamedTuple


class Eviction(NamedTuple):
    """The time when a cached block was evicted, and the request that needed its place."""

    at_ns: int
    request_id: str  # the engine's id of the request; "" for blocks that were read from disk


class LostPrefix(NamedTuple):
    """The tokens right after a prompt's cached part that an earlier prompt had computed, too."""

    num_tokens: int
    eviction: Eviction | None  # eviction of its first missing block; None if only the state at its end is missing
