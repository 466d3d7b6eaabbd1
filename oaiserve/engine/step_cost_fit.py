"""Learns the cost of steps while they run, robustly and in bounded memory. Engine thread only, no torch.

It is a least-squares fit of relative errors, because a step of 8 ms matters as much as one of 400 ms. Steps that differ
much from what was expected count less (Huber's weights). What was learnt long ago is forgotten, but only as far as new
steps say something about it: a server that has had 64 sequences for an hour still knows what one costs.

Steps are gathered, and the fit is renewed for all of them together: that is a few microseconds for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oaiserve.engine.step_cost import KNOTS, Load, StepCost, place

Numbers = NDArray[np.float64]

FIRST_FITS = (4, 8, 16, 32)  # steps after which the first fits are made
BATCH = 64  # steps between later fits
HALF_LIFE = 256  # steps that say something about a number until what was known of it counts half
HUBER = 1.5  # errors of more than so many usual ones count less
LEAST_ERROR = 0.01  # that is usual; no machine is more exact
# How large the numbers other than those of rows may be, for a guess while nothing is known of them: tokens, or draws.
_SCALES = (1000.0, 1000.0, 1.0, 1.0, 1.0, 1.0)
_NUM = len(KNOTS) + len(_SCALES)
_SMOOTHNESS, _RIDGE = 0.05, 1e-4  # of the guess, which data outweighs soon


class StepCostFit:
    """The cost of steps, as far as it is known by now."""

    def __init__(self) -> None:
        self.cost: StepCost | None = None  # unknown before the first steps
        self._rows: list[tuple[Load, int, float]] = []  # since the last fit: load, time, weight
        self._num_steps = 0
        self._next_fit = FIRST_FITS[0]
        self._error = 0.05  # what is usual
        self._unit_ns = 0.0  # a usual step, to which the guess is relative
        self._known = np.zeros((_NUM, _NUM))  # the normal equations
        self._sums = np.zeros(_NUM)
        self._numbers = np.zeros(_NUM)

    def observe(self, load: Load, ns: int, weight: float = 1.0) -> float | None:
        """Learn from a step, and return the error of what was expected of it, as a share of what it took.

        `weight` is less than 1 where the time is less certain. Return None while nothing is expected.
        """
        ns = max(1, ns)
        error = None
        if self.cost is not None:
            expected_ns = self.cost.expected_ns(load)
            error = abs(expected_ns - ns) / ns
            relative = abs(expected_ns - ns) / max(1, expected_ns)
            usual = HUBER * max(LEAST_ERROR, self._error)
            self._error += 0.02 * (min(relative, 2 * usual) - self._error)
            if relative > usual:
                weight *= usual / relative
        self._rows.append((load, ns, weight))
        self._num_steps += 1
        if self._num_steps >= self._next_fit:
            self._fit()
            self._next_fit = next((n for n in FIRST_FITS if n > self._num_steps), self._num_steps + BATCH)
        return error

    def _fit(self) -> None:
        rows, self._rows = self._rows, []
        loads = np.array([features(load) for load, _, _ in rows])
        times = np.array([ns for _, ns, _ in rows], np.float64)
        self._unit_ns = max(self._unit_ns, float(np.median(times)))
        weights = np.sqrt([weight for _, _, weight in rows]) / times
        seen = loads * weights[:, None]
        kept = 0.5 ** (0.5 * (loads != 0).sum(axis=0) / HALF_LIFE)
        self._known *= kept[:, None] * kept
        self._sums = self._known @ self._numbers + seen.T @ (weights * times)
        self._known += seen.T @ seen
        self._numbers = self._solve()
        rows_ns, rest = self._numbers[: len(KNOTS)], self._numbers[len(KNOTS) :] / _SCALES
        self.cost = StepCost(tuple(rows_ns.tolist()), *rest.tolist())

    def _solve(self) -> Numbers:
        """Return the numbers that fit best, of those that are not below 0 and do not fall with the rows."""
        scale = self._unit_ns**-2
        equations = _RISES.T @ (self._known + scale * _GUESS) @ _RISES
        sums = _RISES.T @ self._sums
        free = np.ones(_NUM, bool)
        while True:
            found = np.zeros(_NUM)
            found[free] = np.linalg.solve(equations[np.ix_(free, free)], sums[free])
            below = found < 0
            if not below.any():
                return _RISES @ found
            free &= ~below


def features(load: Load) -> list[float]:
    """Return what a step has of each number of a StepCost. The two knots around its rows have it by their nearness."""
    row = [0.0] * _NUM
    index, way = place(load.rows)
    row[index], row[index + 1] = 1 - way, way
    row[len(KNOTS) :] = (
        load.decode_context / _SCALES[0],
        load.prompt_context / _SCALES[1],
        load.draws / _SCALES[2],
        load.edits / _SCALES[3],
        load.drafted / _SCALES[4],
        1.0 / _SCALES[5] if load.prompt_tokens else 0.0,
    )
    return row


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
