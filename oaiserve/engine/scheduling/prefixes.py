"""The prefix cache for the scheduler: the cached blocks of a sequence, and blocks that running sequences will compute.

Engine thread only, no torch. A full block is found by the hash of its tokens and all tokens before them.

If layers of the model keep a state, a cached prefix is only usable up to a position whose state is cached.
"""

from __future__ import annotations

from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, StatePool, hash_block
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.tiers.lower_tier import LowerTier
from oaiserve.facts.lost_prefix import LostPrefix


class Prefixes:
    """The full blocks of sequences by their hashes: cached, about to be computed, or in the tier below."""

    def __init__(self, pool: BlockPool, states: StatePool | None, tier: LowerTier | None) -> None:
        self._pool = pool
        self._states = states
        self._tier = tier
        self._computing: dict[BlockHash, Sequence] = {}  # full blocks that a running sequence is about to compute

    def hashes(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of the full blocks of the known tokens of a sequence. Each is computed once."""
        hashes = sequence.hashes
        size = self._pool.block_size
        for index in range(len(hashes), len(sequence.token_ids) // size):
            parent = hashes[-1] if hashes else None
            start = index * size
            end = (index + 1) * size
            if sequence.media is None:
                keys = b""
            else:
                keys = sequence.media.keys_in(start, end)
            hashes.append(hash_block(parent, sequence.token_ids[start:end], sequence.cache_salt, keys))
        return hashes

    def look_up(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """Return the first blocks if they are cached, and the hash of the next one if it is expected soon.

        It is expected if a running sequence is about to compute it, or if the tier below is about to copy it back.
        """
        # The last known token is always computed: its logits draw the next one.
        hashes = self.hashes(sequence)[: (len(sequence.token_ids) - 1) // self._pool.block_size]
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._pool.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        if self._states is not None:
            return self._with_state(self._states, hashes, blocks)
        missing = hashes[len(blocks)] if len(blocks) < len(hashes) else None
        if missing is None or missing in self._computing:
            return blocks, missing
        if self._tier is None or not self._tier.serves(sequence):
            return blocks, None
        awaited = self._tier.ask(sequence, hashes, len(blocks))
        if awaited is not None and sequence.num_before_tier is None:
            sequence.num_before_tier = len(blocks) * self._pool.block_size
        return blocks, awaited

    def _with_state(
        self, states: StatePool, hashes: list[BlockHash], blocks: list[int]
    ) -> tuple[list[int], BlockHash | None]:
        """Return the cached blocks up to the last one with a cached state, or the hash of a state that will soon be
        cached."""
        for index in reversed(range(len(hashes))):
            if hashes[index] in self._computing:
                return [], hashes[index]
            if index < len(blocks) and states.find(hashes[index]) is not None:
                return blocks[: index + 1], None
        return [], None

    def lost(self, sequence: Sequence, num_shared: int) -> LostPrefix | None:
        """Return the part of a prompt after its first `num_shared` blocks that the prefix cache has lost, or None.

        Either these blocks were evicted, or they are cached but the state of the layers isn't.
        """
        size = self._pool.block_size
        hashes = self.hashes(sequence)[num_shared : (sequence.prompt_len - 1) // size]
        num_blocks = 0
        eviction = None
        for block_hash in hashes:
            found = self._pool.evictions.find(block_hash)
            if found is None and self._pool.find(block_hash) is None:
                break
            if found is not None and self._states is not None and found.request_id == sequence.request_id:
                found = None  # The sequence has evicted this block itself: without a state, it can't use it.
            eviction = eviction or found
            num_blocks += 1
        if num_blocks == 0:
            return None
        return LostPrefix(num_blocks * size, eviction)

    def ends_to_keep(self, states: StatePool, sequence: Sequence) -> list[int]:
        """Return the positions in a prompt at which the state is to be cached.

        One is the end of the prefix that it has in common with earlier prompts, as far as its blocks are cached,
        because more prompts may begin with it. Another is the end of its full blocks, because the next prompt of a
        conversation begins with them.
        """
        size = self._pool.block_size
        last = sequence.num_computed
        hashes = self.hashes(sequence)[: (sequence.prompt_len - 1) // size]
        num_cached = next((i for i, one in enumerate(hashes) if self._pool.find(one) is None), len(hashes))
        ends: list[int] = []
        for end in (num_cached * size, len(hashes) * size):
            if end - last >= states.shortest_kept:
                ends.append(end)
                last = end
        return ends

    def begin(self, sequence: Sequence) -> None:
        """Note the blocks of a sequence that starts to run in a lane, so that others can wait for them."""
        hashes = self.hashes(sequence)
        size = self._pool.block_size
        if self._states is None:
            useful = hashes[sequence.num_computed // size :]
        else:
            useful = [hashes[end // size - 1] for end in sequence.state_ends if end > sequence.num_computed]
        for block_hash in useful:
            self._computing.setdefault(block_hash, sequence)

    def publish(self, sequence: Sequence, start: int, end: int) -> list[BlockHash]:
        """Publish the full blocks of a sequence between two positions, whose tokens are known and computed.

        Return their hashes: others may have waited for them.
        """
        size = self._pool.block_size
        hashes = self.hashes(sequence)
        tier = self._tier
        if tier is not None and not tier.serves(sequence):
            tier = None
        for index in range(start // size, end // size):
            self._pool.publish(sequence.blocks[index], hashes[index])
            if tier is not None:
                tier.offer(sequence.blocks[index], hashes[index], hashes[index - 1] if index else None)
        return self._end(sequence, hashes[start // size : end // size])

    def leave(self, sequence: Sequence) -> list[BlockHash]:
        """Forget the blocks that a stopping sequence was to compute, and return their hashes."""
        return self._end(sequence, sequence.hashes[sequence.num_computed // self._pool.block_size :])

    def _end(self, sequence: Sequence, hashes: list[BlockHash]) -> list[BlockHash]:
        ended = [one for one in hashes if self._computing.get(one) is sequence]
        for block_hash in ended:
            del self._computing[block_hash]
        return ended

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raise AssertionError if a sequence that isn't running is to compute a block."""
        if len({id(sequence) for sequence in self._computing.values()} - {id(s) for s in running}):
            raise AssertionError("a block is marked as being computed by a sequence that does not run")
