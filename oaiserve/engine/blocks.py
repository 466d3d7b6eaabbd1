"""The pool of KV-cache blocks. Integers only, no torch."""

from __future__ import annotations


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each. A block is free or owned by exactly one sequence."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: what was used last is still warm in the caches
        self._is_free = bytearray(b"\x01") * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """All of them or, where there is no room, None."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        for block in blocks:
            self._is_free[block] = 0
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._is_free[block]:
                raise AssertionError(f"block {block} was released twice")
            self._is_free[block] = 1
        self._free.extend(reversed(blocks))

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free exactly once or used."""
        if len(set(self._free)) != len(self._free) or sum(self._is_free) != len(self._free):
            raise AssertionError("the free list and the free flags disagree")
