"""A tier below the pool of KV blocks: where the prefix cache finds blocks that the pool has lost. No torch."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

from oaiserve.engine.sequences.blocks import BlockHash, BlockPool
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import Runtime


class BlocksArrived(NamedTuple):
    """Blocks have come back from the tier. The engine thread calls `take`, which puts them into the prefix cache and
    returns the hash that sequences may have waited for, if it is there."""

    take: Callable[[], BlockHash | None]


class LowerTier(Protocol):
    """Stores blocks below the pool. The engine thread calls all methods but `start` and `stop`."""

    reason: WaitReason  # why a sequence waits for a block of this tier

    @property
    def on_their_way(self) -> Container[BlockHash]:
        """Return the blocks that are coming back."""

    @property
    def held(self) -> list[int]:
        """Return the blocks of the pool that the tier has a reference to."""

    def serves(self, sequence: Sequence) -> bool:
        """Return whether the blocks of a sequence may be stored in the tier, and come back for it."""

    def offer(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Note a full and computed block, which has just been published."""

    def ask(self, sequence: Sequence, hashes: list[BlockHash], num_in_memory: int) -> BlockHash | None:
        """Return the hash of a block to wait for, after the first blocks of a sequence, or None if none is coming."""

    def flush(self) -> None:
        """Begin the copies that must come before the step that has just been scheduled."""

    def show(self, numbers: EngineNumbers) -> None:
        """Write the numbers of the tier."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


# Makes the tier of a pool. The second argument posts a command to the engine thread, from any thread.
MakeTier = Callable[[BlockPool, Callable[[BlocksArrived], None], Runtime], LowerTier]
