"""Learns the cost of steps while they run, robustly and in bounded memory. No torch.

It is a least-squares fit of relative errors, because a step of 8 ms matters as much as one of 400 ms. Steps that do not
fit to the others count less (Huber's weights). What was learnt long ago is forgotten, but only as far as new steps say
something about it: a server that has had 64 sequences for an hour still knows what one costs.

The engine thread gathers steps, and another thread renews the fit for all of them together. If several steps do not
take what was expected, it is renewed sooner. However short steps are, the fits take a hundredth of their time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.step_cost import KNOTS, Load, StepCost

Numbers = NDArray[np.float64]

FIRST_BATCH, BATCH = 4, 256  # steps up to the first fit, then twice as many each time, up to the later ones
SURPRISE = 0.1  # a larger error
LEAST_SURPRISING = 0.5  # weight of a step that took longer than expected
# The time of steps between two fits, each of which takes half a millisecond. Of more steps, the first BATCH count.
LEAST_NS = 50_000_000
SURPRISES = 4  # so many more than a quarter of the other steps: something is new, and is learnt at once
HALF_LIFE = 1024  # steps that say something about a number until what was known of it counts half
HUBER = 1.0  # errors of more than so many usual ones count less
LEAST_ERROR = 0.01  # that is usual; no machine is more exact
# Two rows may cost so much less than one, as a share of that: the attention of a single sequence leaves cores idle. If
# they might not, what more contexts cost would have to make up for it.
MOST_FALL = 0.5
log = logging.getLogger(__name__)
_KNOTS = np.array(KNOTS, np.float64)
# How large the numbers other than those of rows may be, for a guess while nothing is known of them: tokens, or draws.
_SCALES = (1000.0, 1000.0, 1000.0, 1.0, 1.0, 1.0, 1.0)
_NUM = len(KNOTS) + len(_SCALES)
_SMOOTHNESS, _RIDGE = 0.05, 0.1  # of the guess, which data outweighs soon


Run = Callable[[Callable[[], None]], object]  # runs a function, now or later


def at_once(function: Callable[[], None]) -> None:
    """Run a function now, on this thread."""
    function()


class StepCostFit:
    """StepCostFit has the cost of steps, as far as it is known by now, and learns from each step."""

    def __init__(self, run: Run = at_once) -> None:
        """Begin without knowledge. `run` is given each fit that is due, and may run it on another thread."""
        self.cost: StepCost | None = None  # unknown before the first steps
        self._run = run
        self._rows: list[tuple[Load, int, float]] = []  # since the last fit: load, time, weight
        self._batch = FIRST_BATCH
        self._surprise = 0.0  # since the last fit
        self._since_ns = 0  # the time of the steps since then
        self._is_fitting = False
        # These are written by the fits, of which there is one at a time:
        self._unit_ns = 0.0  # a usual step, to which the guess is relative
        self._known = np.zeros((_NUM, _NUM))  # the normal equations
        self._sums = np.zeros(_NUM)
        self._numbers = np.zeros(_NUM)

    def observe(self, load: Load, ns: int, weight: float = 1.0, error: float = 0.0) -> None:
        """Learn from a step. `weight` is less than 1 where its time is less certain: it may have taken too long.

        `error` is by how much more was expected than it took, by the cost so far, as a share of what it took.
        """
        # No lack of a core lets a step take less than expected.
        if error > SURPRISE or (error < -SURPRISE and weight > LEAST_SURPRISING):
            self._surprise += 1.0
        elif self._surprise:
            self._surprise = max(0.0, self._surprise - 0.25)
        self._since_ns += ns
        rows = self._rows
        if len(rows) < BATCH:
            rows.append((load, ns, weight))
        if self._since_ns >= LEAST_NS and (len(rows) >= self._batch or self._surprise >= SURPRISES):
            self._begin_fit()

    def _begin_fit(self) -> None:
        if self._is_fitting:
            return
        rows, self._rows, self._surprise, self._since_ns = self._rows, [], 0.0, 0
        self._batch = min(BATCH, 2 * self._batch)
        self._is_fitting = True
        self._run(lambda: self._fit(rows))

    def _fit(self, rows: list[tuple[Load, int, float]]) -> None:
        try:
            self.cost = self._fitted(rows)
        except Exception:  # only what these steps say is lost
            log.exception("The cost of steps could not be learnt from %d steps", len(rows))
        finally:
            self._is_fitting = False

    def _fitted(self, rows: list[tuple[Load, int, float]]) -> StepCost:
        loads = features([load for load, _, _ in rows])
        times = np.array([max(1, ns) for _, ns, _ in rows], np.float64)
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
        return StepCost(tuple(rows_ns.tolist()), *rest.tolist())

    def _solve(self) -> Numbers:
        """Return the numbers that fit best, of those that are not below 0 and do not fall from two rows on."""
        scale = self._unit_ns**-2
        equations = _RISES.T @ (self._known + scale * _GUESS) @ _RISES
        equations += np.eye(_NUM) * (1e-12 * equations.max())  # so that they can be solved, whatever was seen
        sums = _RISES.T @ self._sums
        free = np.ones(_NUM, bool)
        while True:
            found = np.zeros(_NUM)
            found[free] = np.linalg.solve(equations[np.ix_(free, free)], sums[free])
            below = found < 0
            below[1] = found[1] < -MOST_FALL * found[0]
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
