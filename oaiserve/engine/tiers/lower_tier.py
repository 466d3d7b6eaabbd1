"""A tier below the pool of KV blocks, in which the prefix cache finds blocks that the pool has lost. No torch."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple, Protocol

from oaiserve.engine.sequences.blocks import BlockHash, BlockPool
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import Runtime


class BlocksArrived(NamedTuple):
    """Blocks have arrived from the tier. The engine thread calls `take`, which puts them into the prefix cache and
    returns the hash that sequences may have waited for, if it has arrived."""

    take: Callable[[], BlockHash | None]


class LowerTier(Protocol):
    """Stores blocks below the pool. The engine thread calls all methods except `start` and `stop`."""

    reason: WaitReason  # why a sequence waits for a block of this tier

    @property
    def on_their_way(self) -> Container[BlockHash]:
        """Return the hashes of the blocks that are being read or restored."""

    @property
    def held(self) -> list[int]:
        """Return the blocks of the pool that the tier holds references to."""

    def serves(self, sequence: Sequence) -> bool:
        """Return whether a sequence's blocks may be stored in the tier and restored for it."""

    def offer(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Note a full and computed block that has just been published."""

    def ask(self, sequence: Sequence, hashes: list[BlockHash], num_in_memory: int) -> BlockHash | None:
        """Return the hash of the block that a sequence has to wait for after its first blocks, or None if no blocks
        will arrive."""

    def flush(self) -> None:
        """Start the copies that must precede the step that has just been scheduled."""

    def show(self, numbers: EngineNumbers) -> None:
        """Copy the tier's counts into `numbers`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


# Makes the tier of a pool. The second argument posts a command to the engine thread, from any thread.
MakeTier = Callable[[BlockPool, Callable[[BlocksArrived], None], Runtime], LowerTier]
