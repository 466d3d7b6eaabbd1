"""The pools of KV cache blocks and of states, and the prefix caches in them: integers and hashes, no torch."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from heapq import heappop, heappush
from itertools import islice
from typing import NewType

from oaiserve.engine.sequences.evictions import Evictions
from oaiserve.facts.lost_prefix import Eviction

# The hash of the tokens of a full block and of all blocks before it: equal hashes mean equal keys and values.
BlockHash = NewType("BlockHash", bytes)
EVICTIONS_PER_BLOCK = 4  # evictions remembered for each block of the pool
SHORTEST_KEPT = 64  # tokens that a cached state must save, because caching one splits the prompt into one more step


def hash_block(
    parent: BlockHash | None, token_ids: Sequence[int], salt: str = "", media_keys: bytes = b""
) -> BlockHash:
    """Return the hash of a full block. `parent` is the hash of the previous block, or None for the first block, and
    `media_keys` are the keys of the images and sounds with tokens in this block.

    The `salt`, which keeps tenants apart, is part of the hash of the first block, and so of all others. The hash is
    cryptographic, because a collision would reveal one client's text to another.
    """
    digest = blake2b(parent if parent is not None else b"first" + salt.encode(), digest_size=16)
    digest.update(array("q", token_ids).tobytes() + media_keys)
    return BlockHash(digest.digest())


class BlockPool:
    """The pool hands out `num_blocks` KV blocks of `block_size` tokens, and finds full blocks by their hash.

    A block is free, or has one reference for each sequence that uses it. A full block can be published under its hash.
    It keeps its content after its last reference is removed, and is found until it is allocated again. Free blocks are
    allocated in the order of `_free`: first those without a hash, then the least recently used ones.

    The time for which a block is used is divided equally between the sequences that use it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 0 or block_size < 1:  # 0 blocks: all sequences are computed without a cache
            raise ValueError(f"a pool has blocks of at least one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        self.allocations = [0] * num_blocks  # allocations so far; a published block's content changes only with them
        # A cache hit removes a block from the middle: an OrderedDict does that in constant time, a deque does not.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._published: dict[BlockHash, int] = {}
        self.evictions = Evictions(EVICTIONS_PER_BLOCK * num_blocks)
        # Called with a block that is about to be reused and the hash of its content. Set by the tier below.
        self.on_eviction: Callable[[int, BlockHash], None] | None = None
        self.num_evicted = 0  # cached blocks whose content was forgotten, so far
        self.evicted_unused_ns = 0  # the time since the last use of each, in total
        self.num_reusable = 0  # free blocks that can still be found by their hash
        self.now_ns = 0
        self.used_ns = 0  # blocks times nanoseconds, until now
        self._held_ns = [0.0] * num_blocks  # time charged to a sequence that holds the block since its first reference
        self._since_ns = [0] * num_blocks  # when its references last changed

    def at(self, now_ns: int) -> None:
        """Set the time of the changes that follow. It never goes backwards."""
        if now_ns > self.now_ns:
            self.used_ns += (now_ns - self.now_ns) * self.num_used
            self.now_ns = now_ns

    def charge(self, num_blocks: int, since_ns: int) -> int:
        """Count blocks that became free at some time as used until now. Return the total of that time.

        The next step may use them already, and then they count for both.
        """
        used_ns = num_blocks * (self.now_ns - since_ns)
        self.used_ns += used_ns
        return used_ns

    def held_ns(self, blocks: Sequence[int]) -> float:
        """Return how much time was charged for these blocks so far, so that a new sharer isn't charged for it."""
        return sum(map(self._held_ns.__getitem__, blocks))

    def _settle(self, block: int) -> None:
        if references := self._references[block]:
            self._held_ns[block] += (self.now_ns - self._since_ns[block]) / references
        else:
            self._held_ns[block] = 0.0
        self._since_ns[block] = self.now_ns

    @property
    def num_used(self) -> int:
        """Return the number of blocks in use by sequences. All others can be allocated, cached or not."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Return the number of blocks with a hash, used or free."""
        return len(self._published)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """Return whether exactly one sequence uses the block and no other can find it in the prefix cache."""
        return self._references[block] == 1 and self._hashes[block] is None

    def allocate(self, num_blocks: int, shared: Sequence[int] = (), *, taker: str = "") -> list[int] | None:
        """Return the `shared` blocks and `num_blocks` more, adding a reference to each. Return None, changing nothing,
        if there are too few.

        Cached blocks that are reused are noted as evicted for the `taker`, the id of a request.
        """
        num_revived = sum(self._references[block] == 0 for block in shared)
        if num_blocks > len(self._free) - num_revived:
            return None
        for block in shared:
            self._settle(block)
            if self._references[block] == 0:
                del self._free[block]
                self.num_reusable -= 1
            self._references[block] += 1
        blocks = list(shared)
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            if (block_hash := self._hashes[block]) is not None:  # The cached content is evicted.
                del self._published[block_hash]
                self._hashes[block] = None
                self.evictions.note(block_hash, Eviction(self.now_ns, taker))
                self.num_evicted += 1
                self.evicted_unused_ns += self.now_ns - self._since_ns[block]
                if self.on_eviction is not None:
                    self.on_eviction(block, block_hash)
                self.num_reusable -= 1
            self._settle(block)
            self._references[block] = 1
            self.allocations[block] += 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int], *, first: bool = False) -> float:
        """Remove one reference from each block. Return the total time for which the blocks were held through them.

        The last blocks of a sequence are the first to be allocated again, because a hit on them needs all blocks before
        them. With `first`, all its blocks are allocated again before those of others.
        """
        held_ns = 0.0
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise AssertionError(f"block {block} was released once too often")
            self._settle(block)
            held_ns += self._held_ns[block]
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if first or self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                self.num_reusable += self._hashes[block] is not None
        return held_ns

    def next_evicted(self, num_blocks: int) -> list[tuple[int, BlockHash]]:
        """Return the cached blocks among those that are allocated next, with their hashes."""
        blocks = islice(self._free, num_blocks)
        return [(block, block_hash) for block in blocks if (block_hash := self._hashes[block]) is not None]

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Let other sequences find a full and computed block, unless one with the same content has been published
        already."""
        if block_hash not in self._published:
            self._published[block_hash] = block
            self._hashes[block] = block_hash
            self.evictions.forget(block_hash)

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the block with that content, or None. The next `allocate` may reuse it, unless it is passed as
        `shared`.

        Any thread may use the result as a boolean.
        """
        return self._published.get(block_hash)

    def check_integrity(self) -> None:
        """Raise AssertionError if free list, references and hashes disagree."""
        if any((self._references[block] == 0) != (block in self._free) for block in range(self.num_blocks)):
            raise AssertionError("a free block has references, or one without is not free")
        named = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        if named != self._published:
            raise AssertionError("the hashes of the blocks and the published ones disagree")
        if self.num_reusable != sum(self._hashes[block] is not None for block in self._free):
            raise AssertionError("the number of reusable blocks is wrong")


class StatePool:
    """The pool of `num_states` states, for models whose layers keep a state instead of keys and values.

    A state has the same size for sequences of any length. It belongs to one sequence, or it is a cached copy, found by
    the hash of the last block of its tokens. When a sequence needs a state, the least recently used copies are dropped
    first. The lowest free state is handed out first, so that unneeded memory is never touched.
    """

    def __init__(self, num_states: int, shortest_kept: int = SHORTEST_KEPT) -> None:
        if num_states < 1:
            raise ValueError(f"a pool has at least one state, got {num_states}")
        self.num_states = num_states
        self.shortest_kept = shortest_kept
        self._free = list(range(num_states))  # a heap
        self._kept: OrderedDict[BlockHash, int] = OrderedDict()

    @property
    def num_owned(self) -> int:
        return self.num_states - len(self._free) - len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def allocate(self) -> int | None:
        """Return a state for a sequence, or None if all belong to others. It still has the content of its last
        owner."""
        if self._free:
            return heappop(self._free)
        if self._kept:
            return self._kept.popitem(last=False)[1]
        return None

    def release(self, state: int) -> None:
        if state in self._free or state in self._kept.values():
            raise AssertionError(f"state {state} was released twice")
        heappush(self._free, state)

    def keep(self, block_hash: BlockHash) -> int | None:
        """Return the place for a copy under this hash, or None if there is a copy already, or no free state."""
        if self.find(block_hash) is not None:
            return None
        state = self.allocate()
        if state is not None:
            self._kept[block_hash] = state
        return state

    def forget_kept(self) -> None:
        for state in self._kept.values():
            heappush(self._free, state)
        self._kept.clear()

    def find(self, block_hash: BlockHash) -> int | None:
        """Return the cached state of these tokens, or None. The next `allocate` may reuse it."""
        state = self._kept.get(block_hash)
        if state is not None:
            self._kept.move_to_end(block_hash)
        return state
