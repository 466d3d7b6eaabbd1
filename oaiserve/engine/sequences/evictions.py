"""Remembers which cached blocks were evicted, to explain why a prompt is read again. Stdlib only."""

from __future__ import annotations

from collections import OrderedDict

from oaiserve.facts.lost_prefix import Eviction


class Evictions:
    """Remembers the latest evictions by hash, for at most `max_blocks` blocks."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_hash: OrderedDict[bytes, Eviction] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_hash)

    def note(self, block_hash: bytes, eviction: Eviction) -> None:
        self._by_hash[block_hash] = eviction
        self._by_hash.move_to_end(block_hash)
        if len(self._by_hash) > self._max_blocks:
            self._by_hash.popitem(last=False)

    def find(self, block_hash: bytes) -> Eviction | None:
        return self._by_hash.get(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Forget the eviction of a block whose content is cached again."""
        self._by_hash.pop(block_hash, None)
