"""The blocks and states of sequences, and the prefix cache in them. Engine thread only, no torch.

This module never preempts a sequence: if there is no room, the caller decides what to do.
"""

from __future__ import annotations

from oaiserve.engine.scheduling.prefixes import Prefixes
from oaiserve.engine.sequences.blocks import BlockHash, BlockPool, StatePool
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Left
from oaiserve.engine.tiers.lower_tier import LowerTier
from oaiserve.facts.record import WaitReason


class SequenceMemory:
    """Gives sequences their blocks and states, shares these between them, and publishes full blocks.

    A running sequence owns blocks for all its tokens except the next one to decode, and for its draft if it had one. A
    waiting sequence owns blocks only if it shares them with another choice of its prompt. Where layers keep a state,
    each sequence that owns blocks owns one state.
    """

    def __init__(
        self, pool: BlockPool, states: StatePool | None, tier: LowerTier | None, *, prefix_cache: bool
    ) -> None:
        self.block_size = pool.block_size
        self._pool = pool
        self._states = states
        self._tier = tier
        # The foreground never waits for blocks that background work is to compute.
        self._foreground = Prefixes(pool, states, tier) if prefix_cache else None
        self._background = Prefixes(pool, states, tier) if prefix_cache else None
        self.state_copies: list[tuple[int, int]] = []  # states to copy before the next step (from, to)
        self.num_prefix_queries = 0  # prompt tokens that were looked up in the prefix cache
        self.num_prefix_hits = 0  # prompt tokens that were found there

    def _prefixes_of(self, sequence: Sequence) -> Prefixes | None:
        if sequence.is_background:
            return self._background
        return self._foreground

    def blocks_for(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many blocks this many tokens of a sequence need."""
        if sequence.is_whole:
            return 0
        return self._pool.blocks_for(num_tokens)

    # -- the prefix cache ---------------------------------------------------------------------------------------------

    def look_up(self, sequence: Sequence) -> tuple[list[int], BlockHash | None]:
        """Return the cached first blocks of a waiting sequence, and the hash of a block to wait for, or None."""
        prefixes = self._prefixes_of(sequence)
        if prefixes is None or sequence.blocks or sequence.wants_prompt_logprobs:
            return [], None  # prompt logprobs need the logits of every position
        return prefixes.look_up(sequence)

    def wait_reason(self, sequence: Sequence, block_hash: BlockHash) -> WaitReason:
        """Return why a sequence waits for this block: the tier below is copying it, or another sequence is computing
        it."""
        tier = self._tier
        if tier is not None and tier.serves(sequence) and block_hash in tier.on_their_way:
            return tier.reason
        return WaitReason.SAME_PREFIX

    def begin(self, sequence: Sequence) -> None:
        """Note the full blocks that a sequence, which begins to run, will compute."""
        if (prefixes := self._prefixes_of(sequence)) is not None:
            prefixes.begin(sequence)

    def publish(self, sequence: Sequence, start: int, end: int) -> list[BlockHash]:
        """Publish the full blocks of a sequence between two positions, whose tokens are known and computed.

        Return their hashes: other sequences may have waited for them.
        """
        prefixes = self._prefixes_of(sequence)
        if prefixes is None:
            return []
        return prefixes.publish(sequence, start, end)

    def stop(self, sequence: Sequence) -> list[BlockHash]:
        """Return the hashes of the full blocks that a sequence was to compute and no longer will."""
        prefixes = self._prefixes_of(sequence)
        if prefixes is None:
            return []
        return prefixes.leave(sequence)

    def start_after(self, sequence: Sequence, shared: list[int]) -> None:
        """Let a sequence start after its first blocks, which are cached."""
        sequence.num_computed = len(shared) * self.block_size
        sequence.held_ns -= self._pool.held_ns(shared)
        if sequence.num_preemptions == 0:
            sequence.num_cached = sequence.num_computed
            prefixes = self._prefixes_of(sequence)
            if prefixes is not None and not sequence.wants_prompt_logprobs:
                self.num_prefix_queries += sequence.prompt_len
                self.num_prefix_hits += sequence.num_cached
                sequence.lost = prefixes.lost(sequence, len(shared))

    # -- blocks -------------------------------------------------------------------------------------------------------

    def num_missing(self, sequence: Sequence, shared: list[int]) -> int:
        """Return how many new blocks a waiting sequence needs besides its own and `shared` ones."""
        num_owned = len(sequence.blocks) + len(shared)
        needs_copy = bool(sequence.blocks) and not self.owns_last_block(sequence)
        return self.blocks_for(sequence, sequence.num_tokens) - num_owned + needs_copy

    def places_to_own(self, sequence: Sequence) -> list[int]:
        """Return the indices of blocks that a running sequence still needs: of a shared one to copy, and of missing
        ones."""
        blocks = sequence.blocks
        first = sequence.num_computed // self.block_size
        lacking = [*range(len(blocks), self._pool.blocks_for(sequence.num_tokens))]
        is_shared = first < len(blocks) and not self._pool.is_writable(blocks[first])
        if is_shared:
            return [first, *lacking]
        return lacking

    def owns_last_block(self, sequence: Sequence) -> bool:
        """Return whether a sequence may write into its last block."""
        return self._pool.is_writable(sequence.blocks[-1])

    def copy_on_write(self, sequence: Sequence, index: int, new_block: int) -> tuple[int, int]:
        """Replace a shared block by a new one. Return the blocks to copy: (from, to)."""
        shared = sequence.blocks[index]
        sequence.blocks[index] = new_block
        sequence.held_ns += self._pool.release([shared])
        return shared, new_block

    def leaving(self, sequence: Sequence) -> Left:
        """Return the blocks that a sequence is about to give back, although its last step still reads them."""
        num_blocks = sum(self._pool.references(block) == 1 for block in sequence.blocks)
        return Left(sequence, num_blocks, self._pool.now_ns)

    def charge_last_step(self, left: Left) -> None:
        """Charge a sequence for the time in which its last step, which has just ended, still read its blocks."""
        left.sequence.held_ns += self._pool.charge(left.num_blocks, left.since_ns)

    def release(self, sequence: Sequence) -> None:
        """Take back all blocks and the state of a sequence. Cached blocks of background work are reused first."""
        sequence.held_ns += self._pool.release(sequence.blocks, first=sequence.is_background)
        sequence.blocks = []
        if self._states is not None and sequence.state is not None:
            self._states.release(sequence.state)
            sequence.state = None

    # -- states -------------------------------------------------------------------------------------------------------

    def take_state(self, sequence: Sequence) -> bool:
        """Give a sequence a state, copied from that of its cached tokens if it has any. Return False if none is
        free."""
        if self._states is None or sequence.state is not None:
            return True
        num_blocks = sequence.num_computed // self.block_size
        if num_blocks:
            cached = self._states.find(sequence.hashes[num_blocks - 1])
        else:
            cached = None
        assert num_blocks == 0 or cached is not None
        state = self._states.allocate()
        if state is None:
            return False
        if cached is not None and cached != state:
            self.state_copies.append((cached, state))
        sequence.state = state
        prefixes = self._prefixes_of(sequence)
        if prefixes is None:
            sequence.state_ends = []
        else:
            sequence.state_ends = prefixes.ends_to_keep(self._states, sequence)
        return True

    def up_to_copy(self, sequence: Sequence, num_tokens: int) -> int:
        """Return how many of its next tokens a sequence may compute in one step.

        A state is copied after the step that leaves it, so the step must not go past that position.
        """
        if self._states is None:
            return num_tokens
        start = sequence.num_computed
        if sequence.siblings:
            ends = [*sequence.state_ends, self.fork_end(sequence)]
        else:
            ends = sequence.state_ends
        return min([num_tokens, *(end - start for end in ends if end > start)])

    def keep_state(self, sequence: Sequence, end: int) -> None:
        """Cache a copy of a sequence's state after its first `end` tokens, which are full blocks."""
        assert self._states is not None
        assert sequence.state is not None
        place = self._states.keep(sequence.hashes[end // self.block_size - 1])
        if place is not None:
            self.state_copies.append((sequence.state, place))

    def forget_states(self) -> None:
        """Forget all cached states and pending copies."""
        assert self._states is not None
        self._states.forget_kept()
        self.state_copies.clear()

    # -- choices of one prompt ----------------------------------------------------------------------------------------

    def fork_end(self, leader: Sequence) -> int:
        """Return how many tokens a leader computes until its siblings can share them."""
        if self._states is None:
            return leader.prompt_len
        return leader.prompt_len - 1

    def fork(self, leader: Sequence) -> list[Sequence]:
        """Let the siblings of a leader share its computed blocks of the prompt, and copy its state. Return those that
        now own blocks.

        Each sibling computes the last token again, for its own logits. A sibling for which no state is free computes
        its whole prompt. So do all siblings if the leader started from a cached state so close to the end of the prompt
        that its own state is past the fork.
        """
        blocks = leader.blocks[: self._pool.blocks_for(leader.prompt_len)]
        siblings = [sibling for sibling in leader.siblings if sibling.place is Place.PARKED]
        leader.siblings = []
        forked = []
        for sibling in siblings:
            if self._states is not None:
                if leader.num_computed == self.fork_end(leader):
                    sibling.state = self._states.allocate()
                else:
                    sibling.state = None
                if sibling.state is None:
                    continue
                assert leader.state is not None
                self.state_copies.append((leader.state, sibling.state))
            shared = self._pool.allocate(0, blocks)
            assert shared is not None
            sibling.blocks = shared
            sibling.held_ns -= self._pool.held_ns(shared)
            sibling.num_cached = leader.prompt_len - 1
            sibling.num_computed = sibling.num_cached
            forked.append(sibling)
        return forked

    def check_integrity(self, owners: list[Sequence], running: list[Sequence]) -> None:
        """Raise AssertionError if blocks or states are not exactly those of their owners."""
        self._pool.check_integrity()
        references = [0] * self._pool.num_blocks
        for sequence in owners:
            for block in sequence.blocks:
                references[block] += 1
        for block in self._tier.held if self._tier is not None else ():
            references[block] += 1
        if references != [self._pool.references(block) for block in range(self._pool.num_blocks)]:
            raise AssertionError("the references of the blocks are not those of the sequences")
        if self._states is not None:
            states = {sequence.state for sequence in owners}
            if None in states or not len(states) == len(owners) == self._states.num_owned:
                raise AssertionError("not every sequence with blocks has a state of its own")
        for prefixes in (self._foreground, self._background):
            if prefixes is not None:
                prefixes.check_integrity(running)
