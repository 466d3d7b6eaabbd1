"""Finds the disturbance on a server's machine, so that a replay is as slow as the recorded load.

The learnt cost is that of undisturbed steps. On a server's own machine, its event loop, tokenizers, other programs and
the load generator of a test take time from steps. Their share is found by replays of the recorded load: it is the one
with which the mean time for a token comes out as measured.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from oaiserve.plan.recorded import Cost, RecordedLoad, busiest
from oaiserve.plan.replay import LoadReplay

MOST_SHARE = 1.0  # of the time of steps; a machine that adds more is overloaded
NUM_HALVINGS = 9
MOST_PROMPTS = 500


def calibrated(load: RecordedLoad) -> RecordedLoad:
    """Return the load with the disturbance in its cost. A load without measured times stays as it is."""
    cost, measured = load.cost, load.tpot_seconds
    if cost is None or measured is None:
        return load
    part = busiest(load, MOST_PROMPTS)
    low, high = 0.0, MOST_SHARE
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if _mean_tpot(part, replace(cost, disturbance_share=middle)) < measured:
            low = middle
        else:
            high = middle
    return replace(load, cost=replace(cost, disturbance_share=low))


def _mean_tpot(load: RecordedLoad, cost: Cost) -> float:
    served = LoadReplay(load.server, cost).run([(arrival.seconds, 0, arrival) for arrival in load.arrivals]).served
    return statistics.fmean(tpot for one in served if (tpot := one.tpot) is not None)
