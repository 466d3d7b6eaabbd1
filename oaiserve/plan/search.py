"""Finds the highest rate at which a simulated server keeps its limits, and which setting would raise it most."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from oaiserve.engine.policy import POLICIES
from oaiserve.engine.step_cost import StepCost
from oaiserve.plan.recorded import RecordedLoad, Server, repeated
from oaiserve.plan.replay import Replay, Replayed, Served

LEAST_SECONDS = 60.0  # of a load: queues take time to grow
MOST_DOUBLINGS = 24
GAPS_SHARE = 0.95  # of the gaps of a request that must keep the limit `itl`

Limits = Mapping[str, float]  # seconds by metric: ttft, itl, tpot, latency


@dataclass(frozen=True, slots=True)
class Highest:
    """The highest rate that keeps the limits, in prompts a second, and what became of the load at it."""

    rate: float
    replayed: Replayed


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value, and the highest rate with it."""

    flag: str
    rate: float


def is_good(served: Served, limits: Limits) -> bool:
    """Return whether a request was answered, and within the limits. Answers of one token keep any `tpot` and `itl`."""
    latency, ttft, gaps = served.latency, served.ttft, served.gaps
    if latency is None or ttft is None:
        return False
    if ttft > limits.get("ttft", ttft) or latency > limits.get("latency", latency):
        return False
    if gaps and sum(gaps) / len(gaps) > limits.get("tpot", float("inf")):
        return False
    within = sum(gap <= limits.get("itl", float("inf")) for gap in gaps)
    return within >= GAPS_SHARE * len(gaps)


def replay(load: RecordedLoad, cost: StepCost, server: Server, rate: float) -> Replayed:
    """Replay a load at a rate, in prompts a second."""
    arrivals = list(repeated(load, rate, LEAST_SECONDS))
    simulated = Replay(server, cost, host_seconds=load.host_seconds, before_queue_seconds=load.before_queue_seconds)
    # What is not answered long after the last arrival would not be good anyway.
    return simulated.run(arrivals, give_up_seconds=2 * arrivals[-1][0] + LEAST_SECONDS)


def highest_rate(
    load: RecordedLoad, cost: StepCost, server: Server, limits: Limits, attainment: float, precision: float = 0.03
) -> Highest | None:
    """Return the highest rate at which the share `attainment` of the requests is good, within `precision` as a share.

    Return None if no rate is low enough.
    """

    def holds(rate: float) -> Replayed | None:
        replayed = replay(load, cost, server, rate)
        good = sum(is_good(served, limits) for served in replayed.served)
        return replayed if good >= attainment * len(replayed.served) else None

    rate, best, fails = load.rate or 1.0, None, None
    for _ in range(MOST_DOUBLINGS):
        if (found := holds(rate)) is not None:
            best, rate = Highest(rate, found), rate * 2
        else:
            fails, rate = rate, rate / 2
        if best is not None and fails is not None:
            break
    while best is not None and fails is not None and fails > best.rate * (1 + precision):
        rate = (best.rate * fails) ** 0.5
        if (found := holds(rate)) is not None:
            best = Highest(rate, found)
        else:
            fails = rate
    return best


def changes(server: Server, limits: Limits) -> Iterator[tuple[str, Server]]:
    """Yield what could be set otherwise: flags with their value, and the settings with it."""
    for factor in (0.5, 2):
        running = max(1, int(server.max_running * factor))
        yield f"--max-running {running}", replace(server, max_running=running)
        tokens = max(server.max_running, int(server.max_step_tokens * factor))
        if tokens != server.max_step_tokens:
            yield f"--max-step-tokens {tokens}", replace(server, max_step_tokens=tokens)
    for policy in POLICIES:
        if policy not in (server.policy, "priority"):  # no recording has priorities
            yield f"--policy {policy}", replace(server, policy=policy)
    yield f"--kv-blocks {server.kv_blocks * 2}", replace(server, kv_blocks=server.kv_blocks * 2)
    target = limits.get("itl", limits.get("tpot"))
    if target is not None and server.itl_target_seconds != target:
        yield f"--itl-target-seconds {target:g}", replace(server, itl_target_seconds=target)
    if server.itl_target_seconds is not None:
        yield "no --itl-target-seconds", replace(server, itl_target_seconds=None)
