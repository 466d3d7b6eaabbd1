"""The account of waits: the waiting time of each sequence by reason, in nanoseconds. Engine thread only.

Its cost per step does not grow with the number of waiting sequences. Most of them wait for one common reason, which the
scheduler knows when it stops admitting. The time of each common reason is summed once for all sequences, and each
sequence stores the totals from when its wait began. The few sequences with a reason of their own are tracked
separately.
"""

from __future__ import annotations

from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.facts.record import WaitReason


class QueueWaits:
    """The waits of all sequences. It reads no clock: its time is that of the last `begin_step`."""

    def __init__(self) -> None:
        self._now_ns = 0  # time of the last step
        # The common reason, since that time, why sequences are not in the step. The scheduler sets it.
        self.reason = WaitReason.STEP_UNDER_WAY
        self._totals_ns = dict.fromkeys(WaitReason, 0)  # time of each common reason, up to the last step
        self._until_next_step: list[Sequence] = []  # sequences whose reasons end with the next step

    def expect(self, sequence: Sequence, since_ns: int) -> None:
        """Begin the wait of a sequence that was tokenized at `since_ns` but isn't ready for a step; `arrive` is called
        later."""
        sequence.own_wait = (WaitReason.STEP_UNDER_WAY, since_ns)

    def arrive(self, sequence: Sequence, since_ns: int) -> None:
        """Begin the wait of a sequence that was tokenized at `since_ns`, too late for any step so far."""
        self.expect(sequence, since_ns)
        self._until_next_step.append(sequence)

    def begin_step(self, now_ns: int) -> None:
        self._totals_ns[self.reason] += now_ns - self._now_ns
        self._now_ns = now_ns
        sequences = self._until_next_step
        self._until_next_step = []
        for sequence in sequences:
            self.join(sequence)

    def lack_blocks(self, sequence: Sequence) -> None:
        """Let a sequence wait for blocks until the next step, because the KV cache has no room for it now."""
        self._set_reason(sequence, WaitReason.NO_BLOCKS, self._now_ns)
        self._until_next_step.append(sequence)

    def park(self, sequence: Sequence, reason: WaitReason, since_ns: int | None = None) -> None:
        """Let a sequence wait for something that is computed or read, since this step or since `since_ns`."""
        self._set_reason(sequence, reason, self._now_ns if since_ns is None else since_ns)

    def unpark(self, sequence: Sequence) -> None:
        """Let a parked sequence wait for the common reason from the next step on."""
        self._until_next_step.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        self.settle(sequence, self._now_ns)

    def join(self, sequence: Sequence) -> None:
        """Let a sequence wait for the common reason from this step on."""
        self.settle(sequence, self._now_ns)
        sequence.own_wait = None
        sequence.wait_totals_ns = self._totals_ns.copy()

    def hand_over(self, sequence: Sequence, now_ns: int) -> None:
        """End the wait of a sequence here, before it waits in another lane. `now_ns` must not be before the last
        step."""
        self.settle(sequence, now_ns)
        self._until_next_step = [other for other in self._until_next_step if other is not sequence]
        sequence.own_wait = None
        sequence.wait_totals_ns = {}

    def reason_of(self, sequence: Sequence) -> WaitReason:
        """Return the current reason of a waiting sequence. Any thread may call this."""
        own = sequence.own_wait
        return self.reason if own is None else own[0]

    def settle(self, sequence: Sequence, now_ns: int) -> dict[WaitReason, int]:
        """Return how long a sequence has waited so far, by reason. `now_ns` must not be before the last step."""
        if sequence.own_wait is not None:
            reason, since_ns = sequence.own_wait
            _add(sequence.waits_ns, reason, now_ns - since_ns)
            sequence.own_wait = (reason, now_ns)
        elif sequence.wait_totals_ns:
            totals_ns = self._totals_ns.copy()
            totals_ns[self.reason] += now_ns - self._now_ns
            for reason, total_ns in totals_ns.items():
                _add(sequence.waits_ns, reason, total_ns - sequence.wait_totals_ns[reason])
            sequence.wait_totals_ns = totals_ns
        return sequence.waits_ns

    def _set_reason(self, sequence: Sequence, reason: WaitReason, since_ns: int) -> None:
        self.settle(sequence, self._now_ns)
        sequence.own_wait = (reason, since_ns)


def _add(waits_ns: dict[WaitReason, int], reason: WaitReason, ns: int) -> None:
    if ns:
        waits_ns[reason] = waits_ns.get(reason, 0) + ns
