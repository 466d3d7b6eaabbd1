"""Finds the highest rate at which a simulated server keeps its limits, and the settings that would raise it most."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

from oaiserve.engine.policy import POLICIES
from oaiserve.facts.slos import Slos, kept
from oaiserve.plan.recorded import Cost, RecordedLoad, RecordedServer, busiest, repeated
from oaiserve.plan.replay import LoadReplay, ReplayedLoad, Served

LOAD_SECONDS = 60.0  # of a load that is replayed: queues take time to grow
LEAST_PROMPTS, MOST_PROMPTS = 400, 1500  # of it: the share of good ones is in part chance
MOST_DOUBLINGS = 16
MOST_DISTURBANCE = 1.0  # as a share of the time of steps; a machine that adds more is overloaded
NUM_HALVINGS = 9  # to find the disturbance
MOST_CALIBRATION_PROMPTS = 500


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate within the limits, in prompts a second, and the load replayed at it."""

    rate: float
    replayed: ReplayedLoad


def is_good(served: Served, slos: Slos) -> bool:
    """Return whether a request was answered, and within the limits."""
    latency, ttft = served.latency, served.ttft
    if latency is None or ttft is None:
        return False
    return kept(slos, ttft=ttft, latency=latency, tpot=served.tpot, gaps=served.gaps)


def good_share(replayed: ReplayedLoad, slos: Slos) -> float:
    return sum(is_good(served, slos) for served in replayed.served) / max(1, len(replayed.served))


def replay(load: RecordedLoad, cost: Cost, server: RecordedServer, rate: float) -> ReplayedLoad:
    """Replay a load at a rate, in prompts a second."""
    number = min(max(LEAST_PROMPTS, LOAD_SECONDS * rate), MOST_PROMPTS)
    arrivals = list(repeated(load, rate, number / rate))
    # A prompt not answered long after the last arrival would not be good anyway.
    return LoadReplay(server, cost).run(arrivals, give_up_seconds=2 * arrivals[-1][0] + LOAD_SECONDS)


def alone(load: RecordedLoad, cost: Cost, server: RecordedServer) -> ReplayedLoad:
    """Replay a load with each of its prompts alone."""
    arrivals = [(index * 3600.0, 0, arrival) for index, arrival in enumerate(load.arrivals)]
    return LoadReplay(server, cost).run(arrivals)


def highest_rate(
    load: RecordedLoad,
    cost: Cost,
    server: RecordedServer,
    slos: Slos,
    attainment: float,
    *,
    first: float | None = None,
    precision: float = 0.03,
) -> Highest | None:
    """Return the highest rate at which the share `attainment` of the requests is good, within `precision` as a share.

    The search begins with the rate `first`, or the recorded one. Return None if requests are not good even alone.
    """
    if good_share(alone(load, cost, server), slos) < attainment:
        return None

    def holds(rate: float) -> ReplayedLoad | None:
        replayed = replay(load, cost, server, rate)
        return replayed if good_share(replayed, slos) >= attainment else None

    rate, best, fails, factor = first or load.rate or 1.0, None, None, 1.25 if first else 2.0
    for _ in range(MOST_DOUBLINGS):
        if (replayed := holds(rate)) is not None:
            best, rate = Highest(rate, replayed), rate * factor
        else:
            fails, rate = rate, rate / factor
        if best is not None and fails is not None:
            break
        factor = min(factor**2, 2.0)
    while best is not None and fails is not None and fails > best.rate * (1 + precision):
        rate = (best.rate * fails) ** 0.5
        if (replayed := holds(rate)) is not None:
            best = Highest(rate, replayed)
        else:
            fails = rate
    return best


def changes(server: RecordedServer, slos: Slos) -> Iterator[tuple[str, RecordedServer]]:
    """Yield other settings: the flag with its value, and the server with it."""
    for factor in (0.5, 2):
        running = max(1, int(server.max_running * factor))
        yield f"--max-running {running}", replace(server, max_running=running)
        tokens = max(server.max_running, int(server.max_step_tokens * factor))
        if tokens != server.max_step_tokens:
            yield f"--max-step-tokens {tokens}", replace(server, max_step_tokens=tokens)
    for policy in POLICIES:
        if policy not in (server.policy, "priority", "deadline"):  # no recording has priorities or deadlines
            yield f"--policy {policy}", replace(server, policy=policy)
    yield f"--kv-blocks {server.kv_blocks * 2}", replace(server, kv_blocks=server.kv_blocks * 2)
    target = slos.get("itl", slos.get("tpot"))
    if target is not None and server.itl_target_seconds != target:
        yield f"--itl-target-seconds {target:g}", replace(server, itl_target_seconds=target)
    if server.itl_target_seconds is not None:
        yield "no --itl-target-seconds", replace(server, itl_target_seconds=None)
    if server.drafts:
        yield "--drafts off", replace(server, drafts=False)


def calibrated(load: RecordedLoad) -> RecordedLoad:
    """Return the load with the disturbance in its cost. A load without measured times stays as it is.

    The learnt cost is that of undisturbed steps. On a server's own machine, its event loop, tokenizers, other programs
    and the load generator of a test take time from steps. With their share, the mean time for a token in a replay of
    the recorded load is as measured.
    """
    cost, measured = load.cost, load.tpot_seconds
    if cost is None or measured is None:
        return load

    def mean_tpot(cost: Cost) -> float:
        served = LoadReplay(load.server, cost).run([(arrival.seconds, 0, arrival) for arrival in part.arrivals]).served
        return statistics.fmean(tpot for one in served if (tpot := one.tpot) is not None)

    part = busiest(load, MOST_CALIBRATION_PROMPTS)
    low, high = 0.0, MOST_DISTURBANCE
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        if mean_tpot(replace(cost, disturbance_share=middle)) < measured:
            low = middle
        else:
            high = middle
    return replace(load, cost=replace(cost, disturbance_share=low))
