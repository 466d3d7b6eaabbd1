"""`LostPrefix`: the part of a prompt that was in the prefix cache and can no longer be used."""

from __future__ import annotations

from typing import NamedTuple


class Eviction(NamedTuple):
    """When a cached block was evicted, and for which request."""

    at_ns: int
    request_id: str  # the engine's id of the request; "" for blocks that were read from disk


class LostPrefix(NamedTuple):
    """The part of a prompt that an earlier one had computed, right after its cached part."""

    num_tokens: int
    eviction: Eviction | None  # eviction of its first missing block; None: only the state at its end is missing
