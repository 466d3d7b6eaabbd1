"""The causes of one request's time in the phases `prefill` and `decode`. Engine thread only, stdlib.

The time of all steps is added up once for all requests, in `Parts`. A request has the totals at which its phase began,
and what differs for it: what its own tokens cost, and the steps that it missed because it was preempted. So a step
costs a request a few additions, and the parts of a phase are a difference of totals: they add up to the phase exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from oaiserve.engine.step_cost import Load
from oaiserve.record import Cause


class Parts(NamedTuple):
    """The time of steps, in nanoseconds, by what it was for. The parts add up to the time between two ends of steps."""

    decodes: int = 0  # expected, of all sequences that decode
    prompts: int = 0  # expected, what all prompts added
    constraint: int = 0
    host: int = 0
    machine: int = 0
    unexplained: int = 0  # what is left, below zero where a step took less than was expected


NOTHING = Parts()
_EXPECTED = (Cause.ALONE, Cause.NEIGHBOUR_DECODES, Cause.NEIGHBOUR_PROMPTS, Cause.PREEMPTION)
_MEASURED = (Cause.CONSTRAINT, Cause.HOST, Cause.MACHINE)


class Share(NamedTuple):
    """The expected time of a step, as one request sees it. The three add up to that of the whole step."""

    alone: int  # of its own tokens, had they been the only ones
    decodes: int  # what other requests' decodes add to that
    prompts: int  # and what their prompts add


class RequestCauses:
    """Adds up the causes of the current phase of a request. StepCauses reports its steps, RequestNotes its phases."""

    __slots__ = (
        "_alone",
        "_at",
        "_decodes",
        "_may_have_missed",
        "_missed",
        "_num_preempted",
        "_number",
        "_prompts",
        "_recomputed",
        "_rest",
        "_since",
        "has_begun",
        "has_several",
        "in_step",
    )

    def __init__(self, *, has_several: bool) -> None:
        self.has_several = has_several  # sequences, so perhaps several chunks in a step
        self.has_begun = False
        # Of a request that has several: the number of its last step, what it had in that, and as what it counts.
        self.in_step: tuple[int, Load, Share] | None = None
        self._number = -1  # of its last step
        self._at = self._since = NOTHING  # the totals after its last step, and when its phase began
        self._num_preempted = 0  # sequences
        self._may_have_missed = False  # steps since its last one, because of that
        # Of the current phase:
        self._alone = self._recomputed = 0  # its own tokens, and those that it computed again
        self._decodes = self._prompts = 0  # what its neighbours added, less what all decodes and prompts took
        self._rest = NOTHING  # of the step under way when it was scheduled
        self._missed = NOTHING  # steps

    def begin(self, totals: Parts, ended_ns: int, scheduled_ns: int, *, behind_prompts: bool) -> None:
        """Begin with the first step of the request, at `scheduled_ns`. The step before ended at `ended_ns`.

        If it was under way at `scheduled_ns`, with or without prompts, its rest was its neighbours' time.
        """
        self.has_begun = True
        self._since = self._at = totals
        rest_ns = ended_ns - scheduled_ns
        if rest_ns <= 0:
            self._rest = Parts(host=rest_ns)  # so much of the time between the steps was before
        elif behind_prompts:
            self._rest = Parts(prompts=rest_ns)
        else:
            self._rest = Parts(decodes=rest_ns)

    def decoded(self, number: int, before: Parts, after: Parts, alone_ns: int) -> None:
        """Add a step, by its number and the totals before and after it, in which the request had one plain token."""
        if self._may_have_missed:
            self._miss_up_to(number, before)
        self._number, self._at = number, after
        self._alone += alone_ns
        self._decodes -= alone_ns

    def took_part(self, number: int, before: Parts, after: Parts, change: Share, *, again: bool) -> None:
        """Add a step, or a further chunk in it: as what the request's own tokens count, and by how much the decodes and
        prompts of its neighbours differ from those of the whole step. `again`: the tokens had been computed before it
        was preempted."""
        if self._may_have_missed:
            self._miss_up_to(number, before)
        self._number, self._at = number, after
        if again:
            self._recomputed += change.alone
        else:
            self._alone += change.alone
        self._decodes += change.decodes
        self._prompts += change.prompts

    def preempted(self) -> None:
        """Note that a sequence was preempted. The steps in which the request has no other one are lost for it."""
        self._num_preempted += 1
        self._may_have_missed = True

    def resumed(self) -> None:
        """Note that a sequence which was preempted is in the next step."""
        self._num_preempted -= 1

    def phase_ended(self, totals: Parts, more_ns: int = 0) -> dict[Cause, int]:
        """Return the causes of the phase that ends now, and begin the next one.

        `more_ns` is the host's time since the last step. The causes add up to the time from the beginning of the phase
        to the end of the last step, and `more_ns`.
        """
        if self._may_have_missed:
            self._miss(totals)
        spent, rest, missed = totals, self._rest, self._missed
        since = self._since
        found = {
            Cause.ALONE: self._alone,
            Cause.NEIGHBOUR_DECODES: spent.decodes - since.decodes + rest.decodes - missed.decodes + self._decodes,
            Cause.NEIGHBOUR_PROMPTS: spent.prompts - since.prompts + rest.prompts - missed.prompts + self._prompts,
            Cause.PREEMPTION: self._recomputed + sum(missed),
            Cause.CONSTRAINT: spent.constraint - since.constraint - missed.constraint,
            Cause.HOST: spent.host - since.host + rest.host - missed.host + more_ns,
            Cause.MACHINE: spent.machine - since.machine - missed.machine,
            Cause.UNEXPLAINED: spent.unexplained - since.unexplained - missed.unexplained,
        }
        self._since = self._at = totals
        self._clear()
        return settled(found)

    def _miss_up_to(self, number: int, before: Parts) -> None:
        if number - self._number > 1:
            self._miss(before)
        self._may_have_missed = self._num_preempted > 0

    def _miss(self, totals: Parts) -> None:
        self._missed = Parts(*(old + b - a for old, a, b in zip(self._missed, self._at, totals, strict=True)))
        self._at = totals

    def _clear(self) -> None:
        self._alone = self._recomputed = self._decodes = self._prompts = 0
        self._rest = self._missed = NOTHING


def settled(parts: Mapping[Cause, int]) -> dict[Cause, int]:
    """Return the same parts without any below zero, and without those that are zero. Their sum stays the same.

    If less time passed than was expected, the expected parts are less, each by its share; if they do not suffice, so
    are the measured ones. Raises ValueError if the sum is below zero.
    """
    total = sum(parts.values())
    if total < 0:
        raise ValueError(f"the causes {dict(parts)} add up to less than nothing")
    found = {cause: max(0, ns) for cause, ns in parts.items()}
    left = total - sum(found[cause] for cause in parts if cause is not Cause.UNEXPLAINED)
    found[Cause.UNEXPLAINED] = max(0, left)
    excess = -min(0, left)
    for group in (_EXPECTED, _MEASURED):
        excess = _shrink(found, group, excess)
    return {cause: ns for cause, ns in found.items() if ns}


def _shrink(found: dict[Cause, int], group: tuple[Cause, ...], excess: int) -> int:
    """Take `excess` from the group, from each part by its share, and return what the group does not have."""
    size = sum(found.get(cause, 0) for cause in group)
    taken = min(excess, size)
    left, left_size = taken, size
    for cause in group:
        ns = found.get(cause, 0)
        if left_size:
            part = left * ns // left_size if ns < left_size else left
            found[cause] = ns - part
            left, left_size = left - part, left_size - ns
    return excess - taken
