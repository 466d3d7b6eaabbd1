"""Why those that wait do, in nanoseconds by reason, at a cost per step that does not grow with their number.

Most of them wait for the same reason, which the scheduler knows when it stops admitting: its time is added up once,
for all, and each one remembers from where on it counts. The few that have a reason of their own are kept apart.
Engine thread only.
"""

from __future__ import annotations

from oaiserve.engine.sequence import Sequence
from oaiserve.record import WaitReason


class QueueWaits:
    """Reads no clock: `begin_step` says what time it is."""

    def __init__(self) -> None:
        self._now_ns = 0  # of the last step
        self._reason = WaitReason.STEP_UNDER_WAY  # of the many, since then
        self._totals_ns = dict.fromkeys(WaitReason, 0)  # of the many, until then
        self._until_next_step: list[Sequence] = []  # they have a reason of their own that ends with the next step

    def arrive(self, sequence: Sequence, since_ns: int) -> None:
        """It has been tokenized since `since_ns`, and nobody can have looked at it yet."""
        self._set_reason(sequence, WaitReason.STEP_UNDER_WAY, since_ns)
        self._until_next_step.append(sequence)

    def begin_step(self, now_ns: int) -> None:
        self._totals_ns[self._reason] += now_ns - self._now_ns
        self._now_ns = now_ns
        sequences, self._until_next_step = self._until_next_step, []
        for sequence in sequences:
            self.join(sequence)

    def end_step(self, reason: WaitReason) -> None:
        """Why nobody else is in this step: so long as it lasts, they wait for that."""
        self._reason = reason

    def lack_blocks(self, sequence: Sequence) -> None:
        """This step tried it, and the KV cache had no room for it."""
        self._set_reason(sequence, WaitReason.NO_BLOCKS, self._now_ns)
        self._until_next_step.append(sequence)

    def park(self, sequence: Sequence, since_ns: int | None = None) -> None:
        """Another one computes what it needs, too: from this step on, or since a newcomer was ready."""
        self._set_reason(sequence, WaitReason.SAME_PREFIX, self._now_ns if since_ns is None else since_ns)

    def unpark(self, sequence: Sequence) -> None:
        self._until_next_step.append(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It is in this step."""
        self.settle(sequence, self._now_ns)

    def join(self, sequence: Sequence) -> None:
        """From this step on it waits like the many."""
        self.settle(sequence, self._now_ns)
        sequence.own_wait = None
        sequence.wait_totals_ns = self._totals_ns.copy()

    def settle(self, sequence: Sequence, now_ns: int) -> dict[WaitReason, int]:
        """What it has waited until now, which is not before the last step; for one that waits."""
        if sequence.own_wait is not None:
            reason, since_ns = sequence.own_wait
            _add(sequence.waits_ns, reason, now_ns - since_ns)
            sequence.own_wait = (reason, now_ns)
        elif sequence.wait_totals_ns:
            totals_ns = self._totals_ns.copy()
            totals_ns[self._reason] += now_ns - self._now_ns
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
