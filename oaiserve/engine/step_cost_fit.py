"""Learns the cost of steps while they run, robustly and in bounded memory. Engine thread only, no torch.

It is a least-squares fit of relative errors, because a step of 8 ms matters as much as one of 400 ms. Steps that do not
fit to the others count less (Huber's weights). What was learnt long ago is forgotten, but only as far as new steps say
something about it: a server that has had 64 sequences for an hour still knows what one costs.

Steps are gathered, and the fit is renewed for all of them together: that is some microseconds for each. If several do
not take what was expected, it is renewed sooner. However short steps are, the fits take a hundredth of their time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.step_cost import KNOTS, Load, StepCost

Numbers = NDArray[np.float64]

FIRST_FITS = (4, 8, 16, 32, 64, 128)  # steps after which the first fits are made
BATCH = 256  # steps between later fits, unless many of them are a surprise
SURPRISE = 0.1  # a larger error
LEAST_SURPRISING = 0.5  # weight
# The time of steps between later fits, of which each takes a millisecond or two. If it has more, the first BATCH count.
LEAST_NS = 100_000_000
SURPRISES = 4  # so many more than a quarter of the other steps: something is new, and is learnt at once
HALF_LIFE = 1024  # steps that say something about a number until what was known of it counts half
HUBER = 1.0  # errors of more than so many usual ones count less
LEAST_ERROR = 0.01  # that is usual; no machine is more exact
_KNOTS = np.array(KNOTS, np.float64)
# How large the numbers other than those of rows may be, for a guess while nothing is known of them: tokens, or draws.
_SCALES = (1000.0, 1000.0, 1000.0, 1.0, 1.0, 1.0, 1.0)
_NUM = len(KNOTS) + len(_SCALES)
_SMOOTHNESS, _RIDGE = 0.05, 1e-4  # of the guess, which data outweighs soon


class StepCostFit:
    """The cost of steps, as far as it is known by now."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None  # unknown before the first steps
        self._rows: list[tuple[Load, int, float]] = []  # since the last fit: load, time, weight
        self._num_steps = 0  # up to the last of the first fits
        self._surprise = 0.0  # since the last fit
        self._since_ns = 0  # the time of the steps since then
        self._unit_ns = 0.0  # a usual step, to which the guess is relative
        self._known = np.zeros((_NUM, _NUM))  # the normal equations
        self._sums = np.zeros(_NUM)
        self._numbers = np.zeros(_NUM)

    def observe(self, load: Load, ns: int, weight: float = 1.0) -> None:
        """Learn from a step. `weight` is less than 1 where its time is less certain."""
        ns = max(1, ns)
        if self.cost is not None and weight > LEAST_SURPRISING:
            is_surprise = abs(self.cost.expected_ns(load) - ns) > SURPRISE * ns
            self._surprise = self._surprise + 1 if is_surprise else max(0.0, self._surprise - 0.25)
        self._since_ns += ns
        if len(self._rows) < BATCH:
            self._rows.append((load, ns, weight))
        if self._num_steps < FIRST_FITS[-1]:
            self._num_steps += 1
            is_time = self._num_steps in FIRST_FITS
        else:
            is_time = self._since_ns >= LEAST_NS and (len(self._rows) >= BATCH or self._surprise >= SURPRISES)
        if is_time:
            self._fit()

    def _fit(self) -> None:
        rows, self._rows, self._surprise, self._since_ns = self._rows, [], 0.0, 0
        loads = features([load for load, _, _ in rows])
        times = np.array([ns for _, ns, _ in rows], np.float64)
        self._unit_ns = max(self._unit_ns, float(np.median(times)))
        loads /= times[:, None]  # so that errors are relative
        kept = 0.5 ** (0.5 * (loads != 0).sum(axis=0) / HALF_LIFE)
        known = self._known * kept[:, None] * kept
        sums = known @ self._numbers
        weights = np.array([weight for _, _, weight in rows])
        for _ in range(2):  # the second time, what does not fit counts less
            weighed = loads * weights[:, None]
            self._known, self._sums = known + loads.T @ weighed, sums + weighed.sum(axis=0)
            self._numbers = self._solve()
            errors = np.abs(loads @ self._numbers - 1)
            usual = HUBER * max(LEAST_ERROR, 1.5 * float(np.median(errors)))
            weights *= usual / np.maximum(usual, errors)
        rows_ns, rest = self._numbers[: len(KNOTS)], self._numbers[len(KNOTS) :] / _SCALES
        self.cost = StepCost(tuple(rows_ns.tolist()), *rest.tolist())

    def _solve(self) -> Numbers:
        """Return the numbers that fit best, of those that are not below 0 and do not fall with the rows."""
        scale = self._unit_ns**-2
        equations = _RISES.T @ (self._known + scale * _GUESS) @ _RISES
        equations += np.eye(_NUM) * (1e-12 * equations.max())  # so that they can be solved, whatever was seen
        sums = _RISES.T @ self._sums
        free = np.ones(_NUM, bool)
        while True:
            found = np.zeros(_NUM)
            found[free] = np.linalg.solve(equations[np.ix_(free, free)], sums[free])
            below = found < 0
            if not below.any():
                return _RISES @ found
            free &= ~below


def features(loads: list[Load]) -> Numbers:
    """Return how much each step has of each number of a StepCost. Of the two knots around its rows it has a part."""
    columns, table, steps = np.array(loads, np.float64), np.zeros((len(loads), _NUM)), np.arange(len(loads))
    rows = columns[:, 0] + columns[:, 3]
    index = np.clip(np.searchsorted(_KNOTS, rows, side="right") - 1, 0, len(KNOTS) - 2)  # as in `place`
    way = (rows - _KNOTS[index]) / (_KNOTS[index + 1] - _KNOTS[index])
    table[steps, index], table[steps, index + 1] = 1 - way, way
    columns = columns[:, [1, 2, 4, 5, 6, 7, 3]]  # in the order of StepCost, and last whether there are prompts
    columns[:, -1] = columns[:, -1] > 0
    table[:, len(KNOTS) :] = columns / _SCALES
    return table


def _guess() -> Numbers:
    """Return the equations of what is likely while nothing is known: a straight line over the rows, and all else 0."""
    equations = np.eye(_NUM) * _RIDGE
    equations[: len(KNOTS), : len(KNOTS)] = np.eye(len(KNOTS)) * 1e-9
    for low, middle, high in zip(range(len(KNOTS)), range(1, len(KNOTS)), range(2, len(KNOTS)), strict=False):
        bend = np.zeros(_NUM)
        first, second = KNOTS[middle] - KNOTS[low], KNOTS[high] - KNOTS[middle]
        bend[low], bend[middle], bend[high] = 1 / first, -1 / first - 1 / second, 1 / second
        bend *= min(first, second)
        equations += _SMOOTHNESS * np.outer(bend, bend)
    return equations


def _rises() -> Numbers:
    """Return the matrix that makes the numbers of rises between knots: the first knot's cost, and how it grows."""
    matrix = np.eye(_NUM)
    matrix[: len(KNOTS), : len(KNOTS)] = np.tril(np.ones((len(KNOTS), len(KNOTS))))
    return matrix


_GUESS, _RISES = _guess(), _rises()
