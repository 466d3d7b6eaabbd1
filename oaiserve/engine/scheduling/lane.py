"""A lane: the sequences of one class of work, and where each of them is. Engine thread only, no torch.

There are two lanes, foreground and background. `Scheduler` moves sequences within a lane, and `Order` only reads it.
When a sequence stops running, it gives back its blocks, and sequences that waited for it continue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from operator import attrgetter

from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.memory import SequenceMemory
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.waiting import WaitingQueue
from oaiserve.engine.scheduling.waits import QueueWaits
from oaiserve.engine.sequences.blocks import BlockHash
from oaiserve.engine.sequences.sequence import Place, Sequence
from oaiserve.engine.sequences.step import Step
from oaiserve.facts.record import WaitReason

_key = attrgetter("key")


class Lane:
    """The waiting, parked and running sequences of one class of work, and its part of the step being scheduled."""

    def __init__(
        self,
        memory: SequenceMemory,
        limits: Limits,
        step_time: StepTime | None,
        by_adapter: dict[int, tuple[int, int]],
        *,
        by_client: bool,
    ) -> None:
        """Begin empty. The lanes share the memory, and `by_adapter`, which counts running and other sequences per
        adapter."""
        self.memory = memory
        self.step_time = step_time
        self.running: list[Sequence] = []  # sorted by key
        self.waiting = WaitingQueue(self.running, by_client=by_client)
        self.forked: dict[Sequence, None] = {}  # waiting sequences that own blocks
        self.waits = QueueWaits()
        self.num_parked = 0
        self.num_preemptions = 0
        self.num_arrived = 0
        self.num_turns = 0  # steps so far in which decodes took turns, so that some were left out
        # CPU time of grammar masks, in nanoseconds, that each client still has to make up for by waiting, by client
        # name.
        self.mask_debts: dict[str, float] = {}
        self.num_steps = 0
        # The tokens of the latest short prompt, and the number of the step up to which it makes steps shorter
        self.short_tokens = 0
        self.shorter_until = 0
        # The limits of the step being scheduled.
        self.max_running = limits.max_running
        self.max_step_tokens = limits.max_step_tokens
        self.step = Step()
        self.beside: Step | None = None  # in the background lane: the foreground's part of the step, if it has work
        self._by_adapter = by_adapter
        # Parked sequences, keyed by the block that is being computed or read, or by the sequence that computes their
        # prompt
        self._parked: dict[Hashable, list[Sequence]] = {}

    def charge_masks(self, sequence: Sequence, mask_ns: int) -> None:
        """Charge the client of a sequence for a mask that delayed others. All background work counts as one client."""
        if self.beside is not None:
            name = ""
        elif self.waiting.has_several_clients:
            name = sequence.client.name
        else:
            return
        self.mask_debts[name] = self.mask_debts.get(name, 0.0) + mask_ns

    def pay_masks(self, paid_ns: float) -> None:
        """Reduce the clients' debts for masks by what a step pays off."""
        self.mask_debts = {name: ns - paid_ns for name, ns in self.mask_debts.items() if ns > paid_ns}

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def owners(self) -> list[Sequence]:
        """Return the sequences that own blocks or a state."""
        return [*self.running, *self.forked]

    # -- arrival, waits and departure ---------------------------------------------------------------------------------

    def arrive(self, sequence: Sequence, num_tokens: int, leader: Sequence | None, since_ns: int) -> None:
        """Add a new sequence with this many tokens to compute, and let it wait.

        If a `leader` is about to compute their common prompt, it waits for that first.
        """
        self.num_arrived += 1
        self.waiting.arrive(sequence, num_tokens)
        self._count(sequence, waiting=1)
        if leader and leader.place is not Place.NOWHERE and leader.num_computed < self.memory.fork_end(leader):
            leader.siblings.append(sequence)
            self._park(sequence, leader, WaitReason.SAME_PREFIX, since_ns)
        else:
            self.waits.arrive(sequence, since_ns)
            self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        sequence.place = Place.WAITING
        self.waiting.add(sequence)

    def wait_again(self, sequence: Sequence) -> None:
        """Put a sequence that has lost its blocks back into the queue. It is computed again from the prefix that is
        still cached."""
        sequence.num_computed = 0
        sequence.has_asked_tier = False
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waits.join(sequence)
        self._count(sequence, waiting=1)
        self.wait(sequence)

    def park(self, sequence: Sequence, block_hash: BlockHash) -> None:
        """Let a sequence that was taken from the queue wait for a block that is being computed or read."""
        self._park(sequence, block_hash, self.memory.wait_reason(sequence, block_hash))

    def _park(self, sequence: Sequence, event: Hashable, reason: WaitReason, since_ns: int | None = None) -> None:
        self.waits.park(sequence, reason, since_ns)
        sequence.place = Place.PARKED
        self.num_parked += 1
        self._parked.setdefault(event, []).append(sequence)

    def unpark(self, *events: Hashable) -> None:
        """Return the sequences that were parked for these events to the queue."""
        for event in events:
            for sequence in self._parked.pop(event, ()):
                if sequence.place is Place.PARKED:
                    self.num_parked -= 1
                    self.waits.unpark(sequence)
                    self.wait(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. This does nothing if it has been removed."""
        self._leave(sequence)
        self.forked.pop(sequence, None)
        self.memory.release(sequence)
        self.unpark(sequence)
        if sequence.num_due:
            self.waiting.served(sequence, sequence.num_due)

    def hand_over(self, sequence: Sequence, now_ns: int) -> None:
        """Remove a sequence that another lane takes over. If it isn't running, it gives back its blocks. Its siblings
        no longer wait for it."""
        if sequence.place is not Place.RUNNING:
            self.forked.pop(sequence, None)
            self.memory.release(sequence)
            sequence.num_computed = 0
        self._leave(sequence)
        for parked in self._parked.values():
            if sequence in parked:
                parked.remove(sequence)
        self.unpark(sequence)
        sequence.siblings = []
        self.waiting.hand_over(sequence)
        self.waits.hand_over(sequence, now_ns)

    def take_over(self, sequence: Sequence) -> None:
        """Run a sequence that was running in another lane, with its blocks."""
        self.num_arrived += 1
        self.waiting.arrive(sequence, sequence.num_uncomputed)
        self._count(sequence, running=1)
        self._begin(sequence)

    # -- running ------------------------------------------------------------------------------------------------------

    def take_blocks(self, sequence: Sequence, shared: list[int], blocks: list[int]) -> None:
        """Give blocks to a sequence that was taken from the queue: cached ones that it shares, and new ones."""
        if sequence in self.forked:
            del self.forked[sequence]
            if not self.memory.owns_last_block(sequence):
                self.copy_on_write(sequence, len(sequence.blocks) - 1, blocks.pop())
        else:
            self.memory.start_after(sequence, shared)
        sequence.blocks += blocks

    def copy_on_write(self, sequence: Sequence, index: int, new_block: int) -> None:
        self.step.copies.append(self.memory.copy_on_write(sequence, index, new_block))

    def run(self, sequence: Sequence) -> None:
        """Let a sequence run that has its blocks, and its state if it needs one."""
        self.waits.leave(sequence)
        self._count(sequence, running=1, waiting=-1)
        self.step.admitted.append(sequence)
        self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        sequence.place = Place.RUNNING
        self.waiting.begin(sequence)
        insort(self.running, sequence, key=_key)
        self.memory.begin(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take away the blocks of a sequence, and let it wait. Published blocks keep their content until they are
        reused."""
        if sequence.place is Place.RUNNING:
            self._leave(sequence)
            self.wait_again(sequence)
            self.step.preempted.append(sequence)
            self.step.chunks[:] = [chunk for chunk in self.step.chunks if chunk.sequence is not sequence]
        self.forked.pop(sequence, None)
        self.memory.release(sequence)
        sequence.num_computed = 0

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publish the full blocks of a sequence between two positions. Their tokens are known and computed."""
        self.unpark(*self.memory.publish(sequence, start, end))

    def fork(self, leader: Sequence) -> None:
        """Let the siblings of a leader share its computed prompt, and wait for their turns."""
        self.forked.update(dict.fromkeys(self.memory.fork(leader)))
        self.unpark(leader)

    def _leave(self, sequence: Sequence) -> None:
        place = sequence.place
        sequence.place = Place.NOWHERE
        if place is Place.RUNNING:
            del self.running[bisect_left(self.running, sequence.key, key=_key)]
            self.waiting.leave(sequence)
            self._count(sequence, running=-1)
            self.unpark(*self.memory.stop(sequence))
        elif place is Place.WAITING:
            self.waiting.discard(sequence)
            self._count(sequence, waiting=-1)
        elif place is Place.PARKED:
            self.num_parked -= 1
            self._count(sequence, waiting=-1)

    def _count(self, sequence: Sequence, *, running: int = 0, waiting: int = 0) -> None:
        if sequence.adapter:
            num_running, num_waiting = self._by_adapter.pop(sequence.adapter, (0, 0))
            counts = (num_running + running, num_waiting + waiting)
            if any(counts):
                self._by_adapter[sequence.adapter] = counts

    def check_integrity(self) -> None:
        """Raise AssertionError if lists, states and counters of the lane contradict each other."""
        if [sequence.key for sequence in self.running] != sorted(sequence.key for sequence in self.running):
            raise AssertionError("the running sequences are out of order")
        if any(sequence.place is not Place.RUNNING for sequence in self.running):
            raise AssertionError("a running sequence is in another place, too")
        if any(sequence.num_uncomputed < 1 for sequence in self.running):
            raise AssertionError("a running sequence has nothing left to compute")
        parked = [s for row in self._parked.values() for s in row if s.place is Place.PARKED]
        if len(parked) != self.num_parked:
            raise AssertionError("the number of parked sequences is wrong")
        self.waiting.check_integrity(self.running)
