"""Finds out how much other programs disturbed a recorded server."""

from __future__ import annotations

import statistics
from dataclasses import replace

from tools.replay.recorded import Cost, RecordedLoad, from_first
from tools.replay.replay import LoadReplay

MOST_DISTURBANCE = 1.0  # as a share of the time of steps; a machine that adds more is overloaded
NUM_HALVINGS = 9  # to find the disturbance
MOST_PROMPTS = 500  # replayed prompts, those of the busiest time


def calibrated(load: RecordedLoad) -> RecordedLoad:
    """Return the load with the disturbance in its cost. A load without measured times is returned unchanged.

    The learned cost is that of undisturbed steps. On a server's own machine, its event loop, tokenizers, other programs
    and the load generator of a test take time from steps. The disturbance is the share with which a replay of the
    recorded load has the measured mean time per output token.
    """
    cost = load.cost
    measured = load.tpot_seconds
    if cost is None or measured is None:
        return load

    def mean_tpot(cost: Cost) -> float:
        served = LoadReplay(load.server, cost).run([(arrival.seconds, 0, arrival) for arrival in part.arrivals]).served
        return statistics.fmean(tpot for one in served if (tpot := one.tpot) is not None)

    part = busiest(load, MOST_PROMPTS)
    low = 0.0
    high = MOST_DISTURBANCE
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if mean_tpot(replace(cost, disturbance_share=middle)) < measured:
            low = middle
        else:
            high = middle
    return replace(load, cost=replace(cost, disturbance_share=low))


def busiest(load: RecordedLoad, most_prompts: int) -> RecordedLoad:
    """Return the busiest stretch of a load: of as many prompts in a row, those that came in the shortest time."""
    arrivals = load.arrivals
    starts = range(max(1, len(arrivals) - most_prompts + 1))
    start = min(starts, key=lambda k: arrivals[min(k + most_prompts, len(arrivals)) - 1].seconds - arrivals[k].seconds)
    return replace(load, arrivals=from_first(arrivals[start : start + most_prompts]))
