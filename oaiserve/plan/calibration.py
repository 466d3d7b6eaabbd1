"""Finds what else runs on a server's machine, so that a replay of what was recorded is as slow as that was.

The learnt cost is that of steps which nothing disturbs. On a server's own machine, its event loop, tokenizers, other
programs and the load generator of a test take time from steps. How much is not known before, but it can be found: the
recorded load is replayed, and the disturbance is the one with which the mean time for a token comes out as measured.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from oaiserve.plan.recorded import Cost, RecordedLoad, busiest
from oaiserve.plan.replay import Replay

MOST_SHARE = 0.25  # of the smallest step: what a stream may add to each step; a machine that takes more is overloaded
NUM_HALVINGS = 8
MOST_PROMPTS = 500


def calibrated(load: RecordedLoad) -> RecordedLoad:
    """Return the load with the disturbance in its cost. What has no measured times stays as it is."""
    cost, measured = load.cost, load.tpot_seconds
    if cost is None or measured is None:
        return load
    part = busiest(load, MOST_PROMPTS)
    low, high = 0.0, MOST_SHARE * cost.step.rows_ns[0] / 1e9
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if _mean_tpot(part, replace(cost, disturbance_seconds=middle)) < measured:
            low = middle
        else:
            high = middle
    return replace(load, cost=replace(cost, disturbance_seconds=low))


def _mean_tpot(load: RecordedLoad, cost: Cost) -> float:
    served = Replay(load.server, cost).run([(arrival.seconds, 0, arrival) for arrival in load.arrivals]).served
    return statistics.fmean(tpot for one in served if (tpot := one.tpot) is not None)
