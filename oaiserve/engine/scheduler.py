"""Which tokens of which sequences the next step computes. Pure Python, no torch, engine thread only.

There is no prefill phase and no decode phase: a sequence has a number of tokens known and a number computed, and
steps hand out their token budget until the second catches up with the first.
"""

from __future__ import annotations

from collections import OrderedDict

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.sequence import Chunk, Sequence, Step


class Scheduler:
    """First come, first served. A sequence is in `waiting`, in `running` or nowhere; only a running one owns blocks,
    and it owns enough for all its known tokens."""

    def __init__(self, pool: BlockPool, *, max_running: int, max_step_tokens: int) -> None:
        if max_step_tokens < max_running:
            # Every running sequence that decodes takes one token of the budget, every step.
            raise ValueError(f"max_step_tokens ({max_step_tokens}) must be at least max_running ({max_running})")
        self.pool = pool
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()  # ordered, and O(1) to leave from the middle
        self.running: OrderedDict[Sequence, None] = OrderedDict()  # in order of admission, so the youngest is last
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        if self.pool.blocks_for(sequence.max_len) > self.pool.num_blocks:
            raise ValueError(f"a sequence of {sequence.max_len} tokens can never fit in the KV cache")
        self.waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """The sequence has finished, failed or was aborted. Does nothing for one that is not here."""
        self.waiting.pop(sequence, 0)
        if self.running.pop(sequence, 0) is None:
            self._release(sequence)

    def schedule(self) -> Step | None:
        """The next step, or None when there is nothing to compute."""
        step = Step()
        budget = self.max_step_tokens
        budget -= self._continue_decodes(step)
        budget -= self._continue_prefills(step, budget)
        self._admit_waiting(step, budget)
        return step if step.chunks else None

    def commit(self, sequence: Sequence, num_computed: int, token_id: int | None) -> None:
        """A chunk of the sequence has been computed, and the next token drawn if the chunk sampled."""
        sequence.num_computed = num_computed
        if token_id is not None:
            sequence.token_ids.append(token_id)

    def _continue_decodes(self, step: Step) -> int:
        for sequence in list(self.running):
            if sequence.num_uncomputed == 1 and sequence in self.running and self._make_room(sequence, step):
                step.chunks.append(Chunk(sequence, sequence.num_computed, 1))
        return len(step.chunks)

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """A block for the token to compute. Without a free one the youngest gives way, at worst the sequence itself."""
        while self.pool.blocks_for(len(sequence.token_ids)) > len(sequence.blocks):
            block = self.pool.allocate(1)
            if block is not None:
                sequence.blocks += block
                continue
            youngest, _ = self.running.popitem()
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting[sequence] = None
        self.waiting.move_to_end(sequence, last=False)
        step.preempted.append(sequence)

    def _continue_prefills(self, step: Step, budget: int) -> int:
        spent = 0
        for sequence in self.running:
            if spent == budget:
                break
            if sequence.num_uncomputed > 1:
                spent += self._take(sequence, step, budget - spent)
        return spent

    def _admit_waiting(self, step: Step, budget: int) -> None:
        """Stops at the first that does not fit: nobody overtakes."""
        while self.waiting and budget > 0 and len(self.running) < self.max_running and not step.preempted:
            sequence = next(iter(self.waiting))
            blocks = self.pool.allocate(self.pool.blocks_for(len(sequence.token_ids)))
            if blocks is None:
                break
            del self.waiting[sequence]
            sequence.blocks = blocks
            self.running[sequence] = None
            budget -= self._take(sequence, step, budget)

    def _take(self, sequence: Sequence, step: Step, budget: int) -> int:
        num_tokens = min(sequence.num_uncomputed, budget)
        chunk = Chunk(sequence, sequence.num_computed, num_tokens)
        if num_tokens == 1:
            # Kept with the decodes, which come first (see Step).
            step.chunks.insert(0, chunk)
        else:
            step.chunks.append(chunk)
        return num_tokens

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []

    def check_integrity(self) -> None:
        """Raises AssertionError unless blocks and queues are consistent."""
        self.pool.check_integrity()
        owned = [block for sequence in self.running for block in sequence.blocks]
        if len(owned) != self.pool.num_used or len(set(owned)) != len(owned):
            raise AssertionError(f"{len(owned)} blocks are owned, {self.pool.num_used} are used")
        if any(sequence.blocks for sequence in self.waiting) or self.running.keys() & self.waiting.keys():
            raise AssertionError("a waiting sequence owns blocks, or a sequence is in both queues")
