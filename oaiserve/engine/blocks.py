"""The pool of KV-cache blocks and the prefix cache in it. Integers and hashes only, no torch."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

# Names the tokens of a full block and of all blocks before it, so equal hashes mean equal keys and values.
BlockHash = NewType("BlockHash", bytes)


def hash_block(parent: BlockHash | None, token_ids: Sequence[int], salt: str = "") -> BlockHash:
    """`parent` is the hash of the block before, None for the first; only there `salt`, which keeps tenants apart, is
    needed. Cryptographic, because a collision would show one client another's text."""
    digest = blake2b(parent if parent is not None else b"first" + salt.encode(), digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    return BlockHash(digest.digest())


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens. A block is free, or has a reference for each sequence that uses it.

    A full block can be published under its hash, and is found by it until the block is needed for something else. It
    stays where it is when its last reference goes: free blocks are taken in the order of `_free`, those without a hash
    first, then those that have been unused for longest.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._references = [0] * num_blocks
        # An OrderedDict, since a hit takes a block out of the middle, which a deque cannot do in constant time.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._published: dict[BlockHash, int] = {}
        self.num_reusable = 0  # free blocks that can still be found by their hash

    @property
    def num_used(self) -> int:
        """Blocks that a sequence uses; the others can be allocated, cached or not."""
        return self.num_blocks - len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, used or free."""
        return len(self._published)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """True when nobody but its one owner reads it, or can find it."""
        return self._references[block] == 1 and self._hashes[block] is None

    def allocate(self, num_blocks: int, shared: Sequence[int] = ()) -> list[int] | None:
        """A reference to each of the `shared` blocks, and `num_blocks` new ones behind them; where there is no room,
        None, and nothing has changed."""
        num_revived = sum(self._references[block] == 0 for block in shared)
        if num_blocks > len(self._free) - num_revived:
            return None
        for block in shared:
            if self._references[block] == 0:
                del self._free[block]
                self.num_reusable -= 1
            self._references[block] += 1
        blocks = list(shared)
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives up one reference to each. The last blocks of a sequence are the first to be taken again, as a hit on
        them needs all those before."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise AssertionError(f"block {block} was released once too often")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_reusable += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """The block is full and computed: from now on others find it. Does nothing where the same content is
        published already: two sequences have computed it at once."""
        if block_hash not in self._published:
            self._published[block_hash] = block
            self._hashes[block] = block_hash

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with that content. It may be taken for something else by the next `allocate` that does not name
        it."""
        return self._published.get(block_hash)

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._published[block_hash]
            self._hashes[block] = None
            self.num_reusable -= 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless free list, references and hashes agree."""
        if any((self._references[block] == 0) != (block in self._free) for block in range(self.num_blocks)):
            raise AssertionError("a free block has references, or one without is not free")
        named = {block_hash: block for block, block_hash in enumerate(self._hashes) if block_hash is not None}
        if named != self._published:
            raise AssertionError("the hashes of the blocks and the published ones disagree")
        if self.num_reusable != sum(self._hashes[block] is not None for block in self._free):
            raise AssertionError("the number of reusable blocks is wrong")
