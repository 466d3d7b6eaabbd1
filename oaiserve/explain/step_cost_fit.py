"""Learns the cost of steps while they run, robustly and in bounded memory. No torch.

It is a least-squares fit of relative errors, in which a second of steps counts as much as any other. Outliers count
less (Huber's weights). New steps replace old ones as in a Kalman filter: the speed of the whole machine changes within
seconds, because other programs share its memory or its power, while the ratios between the costs change more slowly. So
a server that has run 64 sequences for an hour can still estimate the cost of one.

The engine thread collects steps, and another thread renews the fit twice a second, or sooner after several surprising
durations. Fits take a hundredth of the steps' time at most, however short the steps are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from oaiserve.explain.step_cost import KNOTS, Load, Seen, StepCost
from oaiserve.runtime import AT_ONCE, ENDED, Empty, Runtime, When, Worker

Numbers = NDArray[np.float64]

BATCH = 256  # the most steps that a fit learns from; later ones are left out
FIT_NS = 500_000_000  # duration of the steps between two fits; a fit takes half a millisecond
LEAST_NS = 50_000_000  # least duration of the steps between two fits, however surprising they are
LEAST_STEPS = 4
SURPRISE = 0.1  # An error above this share of the real time is a surprise.
LEAST_SURPRISING = 0.4  # A step with less weight is not surprising if it took longer than expected.
SURPRISES = 4  # A fit is made early if surprising steps outnumber a quarter of the others by this many.
SECOND = 100.0  # weight of a second of steps, relative to the first guess
# How fast old steps lose weight: the newest steps, of this total duration, count as much as all older ones. The speed
# of the machine changes all costs alike and fast. The cost of one number relative to the others changes more slowly;
# for that, only steps count that have this number.
SPEED_SECONDS = 1.0
NUMBER_SECONDS = 3.0
LEAST_SHARE = 0.01  # A cost below this share of a typical step may change as fast as a cost of this share.
HUBER = 0.7  # errors above this multiple of the typical one count less
LEAST_ERROR = 0.01  # lower limit of the typical error; no machine is more exact
# Largest fall of a step's cost from one row to two, as a share of the cost of one row. Attention for a single sequence
# leaves cores idle, so a second row may even save time. If no fall were allowed, the fit would attribute the saving to
# the context.
MOST_FALL = 0.5
log = logging.getLogger(__name__)
_KNOTS = np.array(KNOTS, np.float64)
# The first guess: this many units of each number may cost as much as the rest of a typical step. The numbers are
# uncached and cached tokens in decodes' contexts, tokens in prompts' contexts, draws, edits, draft tokens, and whether
# there are prompts.
_SCALES = (2000.0, 2000.0, 30_000.0, 10.0, 10.0, 10.0, 1.0)
_NUM = len(KNOTS) + len(_SCALES)
# Indices of the costs of uncached and of cached context.
_DECODE = len(KNOTS)
_CACHED = len(KNOTS) + 1
_SMOOTHNESS = 2.0  # weights of the first guess, which data soon outweighs
_RIDGE = 0.1


Run = Callable[[Callable[[], None]], object]  # runs a function, now or later


def at_once(function: Callable[[], None]) -> None:
    function()


class FitWorker:
    """Runs fits one after the other, on a worker that starts with the first one.

    Nothing waits for the result of a fit, so the worker's inbox is enough. Submitting a fit to an executor would take
    ten times as long.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._worker: Worker[Callable[[], None] | None] = runtime.worker("step-cost", self._turn)
        self._is_started = False

    def run(self, fit: Callable[[], None]) -> None:
        """Run a fit after the previous ones. Only one thread may call this, and not after `stop`."""
        if not self._is_started:
            self._is_started = True
            self._worker.start()
        self._worker.post(fit)

    def stop(self) -> None:
        self._worker.post(None)

    def _turn(self) -> When:
        try:
            fit = self._worker.take()
        except Empty:
            return None
        if fit is None:
            return ENDED
        fit()
        return AT_ONCE


class StepCostFit:
    """The fit of the cost of steps, which learns from each step."""

    def __init__(self, run: Run = at_once) -> None:
        """Start with an unknown cost. `run` receives each fit that is due, and may run it on another thread."""
        self.cost: StepCost | None = None  # unknown before the first steps
        self._run = run
        self._rows: list[tuple[Load, int, float]] = []  # steps since the last fit: load, time, weight
        self._surprise = 0.0  # number of surprising steps since the last fit, less a quarter of the others
        self._since_ns = 0  # the duration of the steps since the last fit
        self._is_fitting = False
        # Only a fit writes these, and only one fit runs at a time.
        self._seen: Seen | None = None
        self._unit_ns = 0.0  # duration of a typical short step; the initial guess is relative to it
        self._known = np.zeros((_NUM, _NUM))  # the normal equations
        self._sums = np.zeros(_NUM)
        self._numbers = np.zeros(_NUM)

    def observe(self, load: Load, ns: int, weight: float = 1.0, error: float | None = 0.0) -> None:
        """Learn from a step. `weight` is less than 1 if something may have prolonged the step.

        `error` is the expected time minus the actual time, as a share of the actual time; None if no time was expected.
        """
        # A lack of cores can't explain a step that took less time than expected, so that is always surprising.
        if self.cost is None or error is None or error > SURPRISE or (error < -SURPRISE and weight > LEAST_SURPRISING):
            self._surprise += 1.0
        elif self._surprise:
            self._surprise = max(0.0, self._surprise - 0.25)
        if len(self._rows) < BATCH:
            self._rows.append((load, ns, weight))
        self._since_ns = since_ns = self._since_ns + ns
        if since_ns >= LEAST_NS and (since_ns >= FIT_NS or self._surprise >= SURPRISES):
            if self._is_fitting or len(self._rows) < LEAST_STEPS:
                return
            rows = self._rows
            self._rows = []
            self._surprise = 0.0
            self._since_ns = 0
            self._is_fitting = True
            self._run(lambda: self._fit(rows))

    def _fit(self, rows: list[tuple[Load, int, float]]) -> None:
        try:
            self.cost = self._fitted(rows)
        except Exception:  # only what these steps showed is lost
            log.exception("The cost of steps could not be learnt from %d steps", len(rows))
        finally:
            self._is_fitting = False

    def _fitted(self, rows: list[tuple[Load, int, float]]) -> StepCost:
        self._seen = seen = _seen([load for load, _, _ in rows], self._seen)
        loads = features([load for load, _, _ in rows])
        times = np.array([max(1, ns) for _, ns, _ in rows], np.float64)
        usual_ns = _median(times)
        self._unit_ns = min(self._unit_ns or usual_ns, usual_ns)
        known, sums = self._faded(loads, times)
        loads /= times[:, None]  # so that errors are relative
        weights = np.array([weight for _, _, weight in rows]) * times * (SECOND / 1e9)
        for _ in range(2):  # the second time, outliers count less
            weighed = loads * weights[:, None]
            self._sums = sums + weighed.sum(axis=0)
            self._known = known + loads.T @ weighed
            self._numbers = self._solve()
            errors = np.abs(loads @ self._numbers - 1)
            usual = HUBER * max(LEAST_ERROR, 1.5 * _median(errors))
            weights *= usual / np.maximum(usual, errors)
        rows_ns = self._numbers[: len(KNOTS)]
        rest = self._numbers[len(KNOTS) :] / _SCALES
        return replace(StepCost(tuple(rows_ns.tolist()), *rest.tolist()), seen=seen)

    def _faded(self, loads: Numbers, times: Numbers) -> tuple[Numbers, Numbers]:
        """Return the part of the normal equations that still counts after these steps: the matrix (numbers, numbers)
        and the right side (numbers,). `loads` is (steps, numbers), and `times` are in ns."""
        changes = np.maximum(self._numbers, LEAST_SHARE * self._unit_ns) / NUMBER_SECONDS
        changed = np.diag((times @ (loads > 0)) * changes**2)
        changed += times.sum() * np.outer(self._numbers, self._numbers) / SPEED_SECONDS**2
        left = np.eye(_NUM) + self._known @ (changed / (1e9 * SECOND))
        solution = np.linalg.solve(left, np.column_stack([self._known, self._sums])).astype(np.float64)
        known = solution[:, :_NUM]
        return (known + known.T) / 2, solution[:, _NUM]

    def _solve(self) -> Numbers:
        """Return the best fit with allowed numbers: none is below 0, from two rows on more rows don't cost less, and
        cached tokens cost no more than other ones."""
        scale = self._unit_ns**-2
        equations = _RISES.T @ (self._known + scale * _GUESS) @ _RISES
        equations += np.eye(_NUM) * (1e-12 * equations.max())  # so that they can be solved after any observations
        sums = _RISES.T @ self._sums
        free = np.ones(_NUM, bool)
        while True:
            solution = np.zeros(_NUM)
            solution[free] = np.linalg.solve(equations[np.ix_(free, free)], sums[free])
            below = solution < 0
            below[1] = solution[1] < -MOST_FALL * solution[0]
            if not below.any():
                return _RISES @ solution
            free &= ~below


def _seen(loads: list[Load], before: Seen | None) -> Seen:
    sizes = [
        Seen(load.num_tokens, load.num_tokens, load.prompt_tokens, load.prompt_context, load.decode_context)
        for load in loads
    ]
    least, *most = zip(*sizes, *([] if before is None else [before]), strict=True)
    return Seen(min(least), *map(max, most))


def features(loads: list[Load]) -> Numbers:
    """Return how much of each number of a StepCost each step has. A step's rows are divided between the two knots
    around them."""
    columns = np.array(loads, np.float64)
    table = np.zeros((len(loads), _NUM))
    steps = np.arange(len(loads))
    rows = columns[:, 0] + columns[:, 3]
    index = np.clip(np.searchsorted(_KNOTS, rows, side="right") - 1, 0, len(KNOTS) - 2)  # as in `place`
    way = (rows - _KNOTS[index]) / (_KNOTS[index + 1] - _KNOTS[index])
    table[steps, index] = 1 - way
    table[steps, index + 1] = way
    columns = columns[:, [1, 2, 4, 5, 6, 7, 3]]  # in StepCost's order; the last becomes whether there are prompts
    columns[:, -1] = columns[:, -1] > 0
    table[:, len(KNOTS) :] = columns / _SCALES
    return table


def _guess() -> Numbers:
    """Return the equations of the initial guess: two rows cost as much as one, the cost of further rows is a straight
    line, a cached token costs as much as another one, and everything else costs nothing."""
    equations = np.eye(_NUM) * 1e-9

    def small(strength: float, parts: dict[int, float]) -> None:
        """Add an equation that keeps a weighted sum of these numbers small."""
        vector = np.zeros(_NUM)
        vector[list(parts)] = list(parts.values())
        equations[:] += strength * np.outer(vector, vector)

    small(_RIDGE, {0: 1, 1: -1})
    for number in range(len(KNOTS), _NUM):
        small(_RIDGE, {number: 1, _DECODE: -1} if number == _CACHED else {number: 1})
    for middle in range(2, len(KNOTS) - 1):
        before = KNOTS[middle] - KNOTS[middle - 1]
        after = KNOTS[middle + 1] - KNOTS[middle]
        scale = min(before, after)
        bend = {middle - 1: scale / before, middle: -scale / before - scale / after, middle + 1: scale / after}
        small(_SMOOTHNESS, bend)
    return equations


def _rises() -> Numbers:
    """Return the matrix that turns rises into numbers.

    The rises are the first knot's cost, its growth from knot to knot, and the extra cost of uncached tokens.
    """
    matrix = np.eye(_NUM)
    matrix[_DECODE, _CACHED] = 1
    matrix[: len(KNOTS), : len(KNOTS)] = np.tril(np.ones((len(KNOTS), len(KNOTS))))
    return matrix


_GUESS = _guess()
_RISES = _rises()


def _median(numbers: Numbers) -> float:
    """Return the median. numpy's own function imports masked arrays at the first call, which would delay a step."""
    ordered = np.sort(numbers)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
