"""The host pool: KV blocks that a device evicts are copied to host memory, and restored for later prompts.

Copies run while steps are computed. A block is saved when it is about to be reused, and later steps write to it only
after it has been read. A prompt that begins with saved blocks waits in the queue until they are restored, while others
continue. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

from oaiserve.engine.sequences.blocks import BlockHash, BlockPool
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.tiers.lower_tier import BlocksArrived
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.record import WaitReason
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Runtime, When, Worker

LEAST_RESTORED = 64  # in tokens; it is faster to compute fewer than to restore them
# Starting a copy costs the host the same for many blocks as for one. So the blocks that will be evicted next are saved,
# too.
SAVED_TOGETHER = 16
STOP_SECONDS = 5.0  # time limit for copies in progress at the end


class Done(Protocol):
    """A point in a device's work, such as a CUDA event."""

    def synchronize(self) -> None:
        """Wait until the device has reached that point."""


class Copies(Protocol):
    """Copies blocks between the device and the slots of the host pool. `BlockCopies` does it with torch."""

    num_slots: int
    block_bytes: int

    def launched(self) -> Any:
        """Return the point at which all steps launched so far have ended."""

    def save(self, pairs: list[tuple[int, int]], after: Any) -> None:
        """Copy blocks into slots (block, slot) once the device has passed `after`. Steps launched later wait until the
        blocks have been read. If two blocks go to the same slot, the later one stays."""

    def restore(self, pairs: list[tuple[int, int]], after: Any) -> Done:
        """Copy slots into blocks (slot, block), after all saves so far and once the device has passed `after`."""


@dataclass(eq=False, slots=True)
class Restoring:
    """Consecutive blocks that are being restored."""

    hashes: list[BlockHash]
    slots: list[int]
    blocks: list[int]  # includes the cached blocks before them, so that these aren't evicted meanwhile
    error: Exception | None = field(default=None)

    @property
    def targets(self) -> list[int]:
        return self.blocks[-len(self.hashes) :]


class HostPool:
    """Saves the blocks that a pool evicts in slots of host memory, reusing the least recently used slot.

    Restored blocks keep their slots: their content is the same while they are in the pool, so they need not be saved
    again. `post` makes the engine thread take restored blocks.
    """

    reason = WaitReason.PREFIX_RESTORED

    def __init__(
        self, copies: Copies, pool: BlockPool, post: Callable[[BlocksArrived], None], runtime: Runtime
    ) -> None:
        self._copies = copies
        self._pool = pool
        self._post = post
        self._free = list(range(copies.num_slots))
        self._slots: OrderedDict[BlockHash, int] = OrderedDict()  # the least recently used first
        self._saves: list[tuple[int, int]] = []  # blocks to save before the next step is launched, and their slots
        # Blocks published before the last flush were written by steps launched before it, so saving them doesn't have
        # to wait for a later step.
        self._launched = copies.launched()
        self._fresh: set[int] = set()  # blocks published since the last flush
        self._restoring: dict[BlockHash, Restoring] = {}  # keyed by each of their hashes
        self._waiter: Worker[tuple[Restoring, Done] | None] = runtime.worker("restore blocks", self._wait)
        self._num_saved = self._num_restored = self._num_hits = 0
        pool.on_eviction = self._save

    @property
    def on_their_way(self) -> dict[BlockHash, Restoring]:
        return self._restoring

    @property
    def held(self) -> list[int]:
        return [block for restoring in {*self._restoring.values()} for block in restoring.blocks]

    def serves(self, sequence: Sequence) -> bool:
        return True

    def start(self) -> None:
        self._waiter.start()

    def stop(self) -> None:
        self._waiter.post(None)
        self._waiter.join(STOP_SECONDS)

    def offer(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> None:
        self._fresh.add(block)

    def ask(self, sequence: Sequence, hashes: list[BlockHash], num_in_memory: int) -> BlockHash | None:
        missing = hashes[num_in_memory:]
        if missing and (restoring := self._restoring.get(missing[0])) is not None:
            return restoring.hashes[-1]
        if sequence.has_asked_tier:  # Blocks evicted again before its turn are computed.
            return None
        pool = self._pool
        num_needed = pool.blocks_for(sequence.num_tokens) - num_in_memory
        # If the sequence isn't queued yet, or not all of it fits, the blocks would be evicted again before its turn.
        if sequence.place is Place.NOWHERE or num_needed > pool.num_blocks - pool.num_used:
            return None
        found = [*takewhile(lambda one: one in self._slots and pool.find(one) is None, missing)]
        if len(found) * pool.block_size < LEAST_RESTORED:
            return None
        before = [block for one in hashes[:num_in_memory] if (block := pool.find(one)) is not None]
        slots = [self._slots.pop(one) for one in found]  # taken out so that no eviction reuses them
        blocks = pool.allocate(len(found), before, taker=sequence.request_id)
        if blocks is None:
            self._slots.update(zip(reversed(found), reversed(slots), strict=True))
            return None
        sequence.has_asked_tier = True
        restoring = Restoring(found, slots, blocks)
        self._restoring.update(dict.fromkeys(found, restoring))
        self.flush()  # A block may have been evicted to make room for a restored one.
        done = self._copies.restore([*zip(slots, restoring.targets, strict=True)], self._launched)
        self._waiter.post((restoring, done))
        self._num_hits += 1
        return found[-1]

    def flush(self) -> None:
        launched = self._copies.launched()
        if self._saves:
            for block, block_hash in self._pool.next_evicted(max(0, SAVED_TOGETHER - len(self._saves))):
                if block not in self._fresh:
                    self._save(block, block_hash)
            is_fresh = any(block in self._fresh for block, _ in self._saves)
            self._copies.save(self._saves, launched if is_fresh else self._launched)
            self._num_saved += len(self._saves)
            self._saves = []
        self._launched = launched
        self._fresh.clear()

    def take(self, restoring: Restoring) -> BlockHash:
        """Put restored blocks into the prefix cache, and return the hash that was waited for."""
        if restoring.error is not None:
            raise restoring.error
        for block, block_hash in zip(restoring.targets, restoring.hashes, strict=True):
            self._pool.publish(block, block_hash)
            del self._restoring[block_hash]
        self._pool.release(restoring.blocks)
        self._slots.update(zip(restoring.hashes, restoring.slots, strict=True))
        self._num_restored += len(restoring.hashes)
        return restoring.hashes[-1]

    def show(self, numbers: EngineNumbers) -> None:
        numbers.num_offloaded = len(self._slots)
        numbers.offload_out_bytes = self._num_saved * self._copies.block_bytes
        numbers.offload_in_bytes = self._num_restored * self._copies.block_bytes
        numbers.num_offload_hits = self._num_hits

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is lost, or holds two blocks."""
        coming_back = [slot for restoring in {*self._restoring.values()} for slot in restoring.slots]
        slots = [*self._free, *self._slots.values(), *coming_back]
        if sorted(slots) != list(range(self._copies.num_slots)):
            raise AssertionError("a slot of the host pool is lost, or has two blocks")

    def _save(self, block: int, block_hash: BlockHash) -> None:
        """Save a block before the next step is launched, unless it has a slot already."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)
        elif block_hash not in self._restoring and (self._free or self._slots):
            slot = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._slots[block_hash] = slot
            self._saves.append((block, slot))

    def _wait(self) -> When:
        """Wait until the next blocks are restored, and post them. This waits only for the device."""
        try:
            under_way = self._waiter.take()
        except Empty:
            return None
        if under_way is None:
            return ENDED
        restoring, done = under_way
        try:
            done.synchronize()
        except Exception as error:  # The engine thread raises it.
            restoring.error = error
        self._post(BlocksArrived(partial(self.take, restoring)))
        return AT_ONCE
