"""Simulates requests within their deadlines by load and policy: python -m tools.goodput --from RECORDING

The scheduler and the forecasts are the server's, the cost of steps is that of a recorded server (serve
--record-requests). Prompts have 150 tokens in the median and answers 55, with long tails; eight clients send them at
random times. Half are urgent: the deadline is 10 s and 8 times what they would take alone. The others have 60 s and 16
times. A load of 1 is the highest at which 99 % of the requests are answered in time by `fair` without any use of
deadlines. The first minute of each simulation does not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace
from pathlib import Path

from oaiserve.explain.step_cost import Load
from oaiserve.plan.recorded import Arrival, Cost, RecordedServer, read
from oaiserve.plan.replay import LoadReplay, UseOfDeadlines
from tools.markdown import as_markdown

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
WARM_SECONDS, ALL_SHARE, NUM_CLIENTS, MOST_TOKENS, PRECISION = 60.0, 0.99, 8, 1000, 0.02
WAYS: tuple[tuple[str, UseOfDeadlines], ...] = (
    ("fcfs", "ignored"), ("fair", "ignored"), ("fair", "ended"), ("fair", "kept"), ("deadline", "ended"),
    ("deadline", "kept"),
)  # fmt: skip
SAYS = {"ignored": "", "ended": ", late ones end", "kept": ", late ones end, hopeless ones are refused"}


def arrivals(cost: Cost, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return a load at a rate, of any seed the same one but for its pace."""
    rng, at, found = random.Random(seed), 0.0, []
    one = cost.step.expected_ns(Load(decodes=1, draws=1)) / 1e9 + cost.host_seconds
    while at < seconds:
        at += rng.expovariate(rate)
        length = min(2000, max(8, int(rng.lognormvariate(5.0, 0.9))))
        answer = min(600, max(2, int(rng.lognormvariate(4.0, 0.8))))
        first, client, is_urgent = rng.randrange(2**60), rng.randrange(NUM_CLIENTS), rng.random() < 0.5
        prompt_ns = cost.step.expected_ns(Load(0, 0, 0, length, length * (length - 1) // 2, 1))
        alone = prompt_ns / 1e9 + answer * one
        deadline = 10 + 8 * alone if is_urgent else 60 + 16 * alone
        prompt = list(range(first, first + length))
        found.append(Arrival(at, prompt, answer, 1, f"client {client}", [], deadline, MOST_TOKENS))
    return found


def goodput(server: RecordedServer, cost: Cost, use: UseOfDeadlines, rate: float, seconds: float, seed: int) -> float:
    """Return the requests per second that are answered in time."""
    load = [(one.seconds, 0, one) for one in arrivals(cost, rate, seconds, seed)]
    replayed = LoadReplay(server, cost, use).run(load, give_up_seconds=2 * seconds + 120)
    counted = [one for one in replayed.served if one.arrived >= WARM_SECONDS]
    return sum(one.is_in_time for one in counted) / (seconds - WARM_SECONDS)


def rate_of_all(server: RecordedServer, cost: Cost, seconds: float, seeds: range) -> float:
    """Return the highest rate, in requests a second, at which ALL_SHARE are answered in time."""

    def all_in_time(rate: float) -> bool:
        good = [goodput(server, cost, "ignored", rate, seconds, seed) for seed in seeds]
        sent = [sum(one.seconds >= WARM_SECONDS for one in arrivals(cost, rate, seconds, seed)) for seed in seeds]
        return sum(good) * (seconds - WARM_SECONDS) >= ALL_SHARE * sum(sent)

    low, high = 0.0, 0.25
    while all_in_time(high):
        low, high = high, 2 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if all_in_time(middle) else (low, middle)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    args = parser.parse_args()
    recorded = read(args.source)
    if recorded.cost is None:
        parser.error(f"{args.source} does not say what steps cost")
    cost, seeds = recorded.cost, range(args.seeds)
    fair = replace(recorded.server, policy="fair")
    rate = rate_of_all(fair, cost, args.seconds, seeds)
    table = [["policy", *(f"load {load:g}" for load in args.loads)]]
    print(
        f"Load 1 is {rate:.3g} requests/s. Requests in time per second, as median (lowest to highest) of the seeds:\n"
    )
    for policy, use in WAYS:
        server = replace(recorded.server, policy=policy)
        table.append([f"{policy}{SAYS[use]}"])
        for load in args.loads:
            good = sorted(goodput(server, cost, use, load * rate, args.seconds, seed) for seed in seeds)
            table[-1].append(f"{statistics.median(good):.2f} ({good[0]:.2f} to {good[-1]:.2f})")
    print("\n".join(as_markdown(table)))


if __name__ == "__main__":
    main()
