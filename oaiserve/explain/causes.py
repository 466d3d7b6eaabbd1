"""The causes of one request's time in the phases `prefill` and `decode`. Engine thread only, stdlib.

The time of all steps is added up once for all requests, in `Parts`. A request stores the totals at the beginning of its
phase, and what only concerns itself: the cost of its own tokens, and the steps that it missed while it was preempted.
So each step costs one addition per request, and the causes of a phase are differences of totals, which add up to the
phase exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from oaiserve.explain.client_work import ClientWork
from oaiserve.facts.record import Cause


class Parts(NamedTuple):
    """The time of steps by purpose, in nanoseconds. The numbers add up to the time between the ends of two steps."""

    decodes: int = 0  # expected time of all decoding sequences
    prompts: int = 0  # expected time of all prompts
    media: int = 0  # time in which media were encoded between steps
    constraint: int = 0
    host: int = 0
    machine: int = 0
    still: int = 0  # time in which the whole process stood still
    unknown: int = 0  # time of steps that had no expected time yet
    unexplained: int = 0  # the rest; below zero if a step took less time than expected


NOTHING = Parts()
_EXPECTED = (Cause.ALONE, Cause.NEIGHBOUR_DECODES, Cause.NEIGHBOUR_PROMPTS, Cause.PREEMPTION)
_MEASURED = (
    Cause.NEIGHBOUR_MEDIA,
    Cause.OWN_MEDIA,
    Cause.CONSTRAINT,
    Cause.HOST,
    Cause.MACHINE,
    Cause.STANDSTILL,
    Cause.ENGINE_RESTART,
    Cause.NOT_KNOWN_YET,
)
# If more than this share of a phase's time is unknown, its expected parts count as unknown, too.
MOST_UNKNOWN = 0.15


@dataclass(slots=True, eq=False, kw_only=True)
class RequestCauses:
    """The causes of the current phase of a request. StepCauses reports the request's steps, and RequestNotes its
    phases."""

    has_several: bool  # whether the request has several sequences, and may have several chunks in a step
    client: ClientWork = field(default_factory=lambda: ClientWork("", None))  # the client that sent it
    # Whether every step computes one token of the request's only sequence, so that only `alone_ns` has to grow.
    is_plain: bool = field(init=False)
    has_begun: bool = False
    # The request's shares since its beginning, as divided by `oaiserve.engine.accounts.shares`.
    core_ns: float = 0.0
    machine_ns: float = 0.0
    weight_reads: float = 0.0  # its share of the steps' reads of the weights, by rows
    _since: Parts = NOTHING  # the totals when its phase began
    _num_preempted: int = 0  # preempted sequences
    may_have_missed: bool = False  # The request was preempted, and may have missed steps.
    _number: int = -1  # the number of its last step, if it may have missed some
    _at: Parts = NOTHING  # the totals after that step
    # The following numbers are for the current phase.
    alone_ns: float = 0.0  # the expected time of its own tokens alone
    media_ns: int = 0  # time of its own media that were encoded between steps
    _recomputed: int = 0  # the part of `alone_ns` for tokens that a preemption had dropped
    _of_prompts: int = 0  # expected time of its own prompts together with its neighbours' decodes
    _rest: Parts = NOTHING  # the rest of the step that was running when the request was scheduled
    _missed: Parts = NOTHING  # the time of steps that the request missed

    def __post_init__(self) -> None:
        self.is_plain = not self.has_several

    def begin(
        self, totals: Parts, ended_ns: int, scheduled_ns: int, *, behind_prompts: bool, encoded_ns: int = 0
    ) -> None:
        """Begin when the request is scheduled for its first step, at `scheduled_ns`. The previous step ended at
        `ended_ns`, and then images and sounds were encoded for `encoded_ns`.

        If the previous step was still running at `scheduled_ns`, the rest of it is charged to neighbours: to their
        prompts with `behind_prompts`, else to their decodes.
        """
        self.has_begun = True
        self._since = totals
        rest_ns = ended_ns - scheduled_ns
        if rest_ns <= 0:
            # Part of the time between the two steps passed before the request was scheduled.
            self._rest = Parts(media=-encoded_ns, host=rest_ns + encoded_ns)
        elif behind_prompts:
            self._rest = Parts(prompts=rest_ns)
        else:
            self._rest = Parts(decodes=rest_ns)

    def took_part(self, number: int, before: Parts, after: Parts) -> None:
        """Note that the request took part in a step, given the step's number and the totals before and after. Plain
        requests need no such call."""
        if not self.may_have_missed:
            return
        if number - self._number > 1:
            self._miss(self._at, before)
        self._number = number
        self._at = after
        self.may_have_missed = self._num_preempted > 0
        self.is_plain = not self.may_have_missed and not self.has_several

    def computed(self, alone_ns: int, of_prompts_ns: int, recomputed_ns: int) -> None:
        """Add the expected times of the request's tokens in a step: of all tokens alone, of its prompts together with
        the step's decodes, and of tokens computed again after a preemption, which are a part of the first."""
        self.alone_ns += alone_ns
        self._of_prompts += of_prompts_ns
        self._recomputed += recomputed_ns

    def preempted(self, number: int, totals: Parts) -> None:
        """Note that a sequence was preempted after `number` steps. From then on, steps without any sequence of the
        request count as missed."""
        self._num_preempted += 1
        self.is_plain = False
        if not self.may_have_missed:
            self.may_have_missed = True
            self._number = number - 1
            self._at = totals

    def resumed(self) -> None:
        """Note that a preempted sequence is in the next step."""
        self._num_preempted -= 1

    def phase_ended(self, totals: Parts) -> dict[Cause, int]:
        """Return the causes of the phase that ends, and begin the next one.

        The causes add up to the time from the beginning of the phase to the end of the last step.
        """
        if self.may_have_missed:
            self._miss(self._at, totals)
            self._at = totals
        causes_ns = settled(self.so_far(totals))
        self._since = totals
        self.alone_ns = 0.0
        self.media_ns = 0
        self._recomputed = 0
        self._of_prompts = 0
        self._rest = self._missed = NOTHING
        return causes_ns

    def so_far(self, totals: Parts, more_alone_ns: float = 0.0) -> dict[Cause, int]:
        """Return the causes of the current phase up to the last step, some of which may be below zero. `more_alone_ns`
        is added to the expected time of the request's own tokens. Any thread may call this."""
        alone_ns = int(self.alone_ns + more_alone_ns)
        of_prompts_ns = self._of_prompts
        missed = self._missed
        terms = zip(totals, self._since, self._rest, missed, strict=True)
        spent = Parts(*(now - since + rest - without for now, since, rest, without in terms))
        parts = {
            Cause.ALONE: alone_ns - self._recomputed,
            Cause.NEIGHBOUR_DECODES: spent.decodes - (alone_ns - of_prompts_ns),
            Cause.NEIGHBOUR_PROMPTS: spent.prompts - of_prompts_ns,
            Cause.PREEMPTION: self._recomputed + sum(missed),
            Cause.NEIGHBOUR_MEDIA: spent.media - self.media_ns,
            Cause.OWN_MEDIA: self.media_ns,
            Cause.CONSTRAINT: spent.constraint,
            Cause.HOST: spent.host,
            Cause.MACHINE: spent.machine,
            Cause.STANDSTILL: spent.still,
            Cause.NOT_KNOWN_YET: spent.unknown,
            Cause.UNEXPLAINED: spent.unexplained,
        }
        if spent.unknown > MOST_UNKNOWN * (spent.decodes + spent.prompts + spent.unknown):
            for cause in (Cause.ALONE, Cause.NEIGHBOUR_DECODES, Cause.NEIGHBOUR_PROMPTS):
                parts[Cause.NOT_KNOWN_YET] += parts.pop(cause)
        return parts

    def _miss(self, since: Parts, totals: Parts) -> None:
        self._missed = Parts(*(old + b - a for old, a, b in zip(self._missed, since, totals, strict=True)))


def settled(parts: Mapping[Cause, int]) -> dict[Cause, int]:
    """Return the causes without negative and zero times, and with the same sum.

    If less time passed than expected, the expected causes shrink in proportion, and then the measured ones. Raises
    ValueError if the sum is below zero.
    """
    total = sum(parts.values())
    if total < 0:
        raise ValueError(f"the causes {dict(parts)} add up to less than nothing")
    shares = {cause: max(0, ns) for cause, ns in parts.items()}
    left = total - sum(shares.values()) + shares.get(Cause.UNEXPLAINED, 0)
    shares[Cause.UNEXPLAINED] = max(0, left)
    if left < 0:
        excess = -left
        for group in (_EXPECTED, _MEASURED):
            excess = _shrink(shares, group, excess)
    return {cause: ns for cause, ns in shares.items() if ns}


def _shrink(shares: dict[Cause, int], group: tuple[Cause, ...], excess: int) -> int:
    """Take `excess` from the causes of a group in proportion to their times, and return what exceeds the whole
    group."""
    size = sum(shares.get(cause, 0) for cause in group)
    taken = min(excess, size)
    left = taken
    left_size = size
    for cause in group:
        ns = shares.get(cause, 0)
        if left_size:
            part = left * ns // left_size if ns < left_size else left
            shares[cause] = ns - part
            left = left - part
            left_size = left_size - ns
    return excess - taken
