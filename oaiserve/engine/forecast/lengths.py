"""Learns the lengths of answers, as a distribution for each class of similar requests. Stores no text. Stdlib only.

An answer that was cut off at its limit, or by its client, would have been longer by an unknown number of tokens. So a
class counts how many answers reach each length, and the share of these that end there (Kaplan and Meier,
"Nonparametric estimation from incomplete observations", 1958). A class with few answers leans on a wider class.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

# One bucket per length up to 16, then eight per doubling: a resolution of about a tenth.
_BOUNDS: list[int] = [*range(16), *(round(16 * 2.0 ** (eighth / 8)) for eighth in range(8 * 16 + 1))]
MOST_CLASSES = 4096  # 2 KB each; the least recently used are dropped
MEMORY = 256.0  # At twice this number of answers, a class halves its counts, so that older answers fade.
LEAN = 8.0  # The wider class has the weight of this number of answers.


def _place(num_tokens: int) -> int:
    return min(bisect_right(_BOUNDS, num_tokens) - 1, len(_BOUNDS) - 1)


@dataclass(slots=True)
class _Class:
    ended: list[float] = field(default_factory=lambda: [0.0] * len(_BOUNDS))
    reached: list[float] = field(default_factory=lambda: [0.0] * (len(_BOUNDS) + 1))  # answers cut off at each place
    weight: float = 0.0
    version: int = 0


class LengthCurve:
    """The distribution of an answer's length without a limit: the share of answers that have ended at each place."""

    def __init__(self, shares: list[float]) -> None:
        self._shares = shares

    def at(self, level: float, limit: int, so_far: int = 0) -> int:
        """Return the length in tokens, at most the limit, that this share of answers does not exceed. Only answers with
        more than `so_far` tokens count."""
        gone = self._shares[_place(so_far)] if so_far else 0.0
        place = bisect_left(self._shares, gone + level * (1 - gone))
        if place >= len(_BOUNDS):
            return limit
        return max(min(_BOUNDS[place], limit), min(so_far + 1, limit))


class Lengths:
    """The distributions by class. A request has classes from the widest to its own, which are any hashable values."""

    def __init__(self) -> None:
        self._classes: OrderedDict[Hashable, _Class] = OrderedDict()
        self._curves: OrderedDict[Hashable, tuple[int, LengthCurve]] = OrderedDict()

    def observe(self, classes: Sequence[Hashable], num_tokens: int, *, has_ended: bool) -> None:
        """Learn from an answer. One that did not end by itself says only that it has reached its length."""
        place = _place(num_tokens)
        for name in classes:
            learnt = self._classes.get(name)
            if learnt is None:
                learnt = self._classes[name] = _Class()
                if len(self._classes) > MOST_CLASSES:
                    self._classes.popitem(last=False)
            self._classes.move_to_end(name)
            (learnt.ended if has_ended else learnt.reached)[place] += 1.0
            learnt.weight += 1.0
            learnt.version += 1
            if learnt.weight > 2 * MEMORY:
                learnt.ended = [0.5 * one for one in learnt.ended]
                learnt.reached = [0.5 * one for one in learnt.reached]
                learnt.weight *= 0.5

    def curve(self, classes: Sequence[Hashable]) -> LengthCurve:
        found = [self._classes.get(name) for name in classes]
        version = sum(one.version for one in found if one is not None)
        own = tuple(classes)
        known = self._curves.get(own)
        if known is None or (more := version - known[0]) >= 16 or more > 0.05 * known[0]:
            known = version, LengthCurve(_shares([one for one in found if one is not None]))
            self._curves[own] = known
            if len(self._curves) > MOST_CLASSES:
                self._curves.popitem(last=False)
        return known[1]


def _shares(classes: list[_Class]) -> list[float]:
    """Return the shares of answers that have ended at each place, by the last class and the wider ones before it."""
    hazards = [0.01] * len(_BOUNDS)
    for learnt in classes:
        at_risk = learnt.weight
        for place, (ended, reached, wider) in enumerate(zip(learnt.ended, learnt.reached, hazards, strict=False)):
            hazards[place] = (ended + LEAN * wider) / (at_risk + LEAN) if at_risk > 0 else wider
            at_risk -= ended + reached
    shares = []
    left = 1.0
    for hazard in hazards:
        left *= 1 - hazard
        shares.append(1 - left)
    return shares
