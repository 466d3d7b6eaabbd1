"""Requests within their deadlines by load and policy: python -m tools.goodput [--server | --from RECORDING]

The scheduler and the forecasts are the server's, the cost of steps is that of a recording (serve --record-requests), or
of the demo model here and now. Prompts have 150 tokens in the median and answers 55, with long tails; eight clients
send them at random times. Half are urgent: the deadline is 10 s and 8 times what they would take alone. The others have
60 s and 16 times. A load of 1 is the highest at which 99 % of the requests are answered in time by `fair` without any
use of deadlines. The first minute of each simulation does not count.

With --server, servers of the demo model answer 1.5 times the highest load that one has answered in time so, by three
policies in turns, without deadlines and with them, in runs of three minutes, of which the first one does not count.
Their requests have the length of the answer as limit.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from oaiserve.explain.step_cost import Load
from tools.charts import curves
from tools.load import run_bench
from tools.markdown import as_markdown
from tools.replay.calibration import calibrated
from tools.replay.recorded import Arrival, Cost, RecordedLoad, RecordedServer, read
from tools.replay.replay import LoadReplay, UseOfDeadlines
from tools.server_process import exit_on_sigterm, running_oaiserve

LOADS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
WARM_SECONDS = 60.0
ALL_SHARE = 0.99
NUM_CLIENTS = 8
MOST_TOKENS = 1000
PRECISION = 0.02
WAYS: tuple[tuple[str, UseOfDeadlines], ...] = (
    ("fcfs", "ignored"), ("fair", "ignored"), ("fair", "ended"), ("fair", "kept"), ("deadline", "ended"),
    ("deadline", "kept"),
)  # fmt: skip
SAYS = {"ignored": "", "ended": ", late ones end", "kept": ", late ones end, hopeless ones are refused"}
# The policies that are served, and whether requests have deadlines.
SERVED = (("fcfs", False), ("fair", False), ("fair", True), ("deadline", True))
SERVED_LOAD = 1.5
SERVED_FACTOR = 1.1  # growth of the load, until some requests are late
SERVED_SECONDS = 180.0
SERVED_WARM_SECONDS = 60.0
FIRST_ID = 100  # token ids of the demo model
NUM_IDS = 40_000
WARM_UP = {"--num-requests": 96, "--concurrency": 24, "--input-len": 150, "--max-new-tokens": 50}


def arrivals(cost: Cost, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return a load at a rate. With the same seed, only the pace differs."""
    rng = random.Random(seed)
    at = 0.0
    drawn = []
    one = cost.step.expected_ns(Load(decodes=1, draws=1)) / 1e9 + cost.host_seconds
    while at < seconds:
        at += rng.expovariate(rate)
        length = min(2000, max(8, int(rng.lognormvariate(5.0, 0.9))))
        answer = min(600, max(2, int(rng.lognormvariate(4.0, 0.8))))
        first = rng.randrange(2**60)
        client = rng.randrange(NUM_CLIENTS)
        is_urgent = rng.random() < 0.5
        prompt_ns = cost.step.expected_ns(Load(0, 0, 0, length, length * (length - 1) // 2, 1))
        alone = prompt_ns / 1e9 + answer * one
        deadline = 10 + 8 * alone if is_urgent else 60 + 16 * alone
        prompt = list(range(first, first + length))
        drawn.append(Arrival(at, prompt, answer, 1, f"client {client}", [], deadline, MOST_TOKENS))
    return drawn


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

    low = 0.0
    high = 0.25
    while all_in_time(high):
        low = high
        high = 2 * high
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if all_in_time(middle) else (low, middle)
    return low


def recorded_demo() -> RecordedLoad:
    """Return a load of the demo model that is recorded now."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "load.jsonl"
        with running_oaiserve("--record-requests", str(path)) as server:
            run_bench(server.url, WARM_UP, "--no-stop-on-eos")
        return read(path)


def served(policy: str, is_told: bool, cost: Cost, rate: float, seed: int) -> tuple[float, float]:
    """Return how many requests per second a server answers in time, and their share."""

    async def is_in_time(http: httpx.AsyncClient, one: Arrival) -> bool:
        await asyncio.sleep(one.seconds)
        most = one.deadline_seconds or 0.0
        began = time.monotonic()
        headers = {"x-deadline-ms": str(int(1000 * most))} if is_told else {}
        prompt = [FIRST_ID + token % NUM_IDS for token in one.prompt]
        body = {"prompt": prompt, "max_tokens": one.answer_tokens, "ignore_eos": True, "temperature": 1}
        answer = await http.post("/v1/completions", json=body, headers=headers)
        return answer.is_success and time.monotonic() - began <= most

    async def answered(url: str) -> list[bool]:
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=None)) as http:
            return await asyncio.gather(*(is_in_time(http, one) for one in load))

    load = arrivals(cost, rate, SERVED_SECONDS, seed)
    with running_oaiserve("--policy", policy, "--max-waiting", "10000") as server:
        run_bench(server.url, WARM_UP, "--no-stop-on-eos")
        in_time = asyncio.run(answered(server.url))
    counted = [good for good, one in zip(in_time, load, strict=True) if one.seconds >= SERVED_WARM_SECONDS]
    print(
        f"{shown(policy, is_told)} at {rate:.2f} a second: {sum(counted)} of {len(counted)} in time",
        file=sys.stderr,
        flush=True,
    )
    return sum(counted) / (SERVED_SECONDS - SERVED_WARM_SECONDS), sum(counted) / len(counted)


def rate_of_servers(cost: Cost, rate: float) -> float:
    """Return the highest rate that a server answers in time so, near a rate."""
    while served("fair", False, cost, rate, 0)[1] < ALL_SHARE:
        rate /= SERVED_FACTOR
    while served("fair", False, cost, rate * SERVED_FACTOR, 0)[1] >= ALL_SHARE:
        rate *= SERVED_FACTOR
    return rate


def served_rows(cost: Cost, rate: float, seeds: range) -> list[list[str]]:
    """Return the table of what servers answer in time, in as many rounds as there are seeds."""
    rounds = [{way: served(*way, cost, SERVED_LOAD * rate, seed)[0] for way in SERVED} for seed in seeds]
    table = [[shown(*way), spread([each[way] for each in rounds])] for way in SERVED]
    return [["policy", f"in time, of {SERVED_LOAD * rate:.2f} a second"], *table]


def shown(policy: str, is_told: bool) -> str:
    return f"{policy}, {'with' if is_told else 'without'} deadlines"


def spread(good: list[float]) -> str:
    return f"{statistics.median(good):.2f} ({min(good):.2f} to {max(good):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path)
    parser.add_argument("--server", action="store_true", help="real servers in place of simulated ones")
    parser.add_argument("--seconds", type=float, default=360, help="of arrivals")
    parser.add_argument("--rate", type=float, help="load 1, in requests per second, where it is known")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw the medians there")
    args = parser.parse_args()
    exit_on_sigterm()
    recorded = recorded_demo() if args.source is None else read(args.source)
    if recorded.cost is None:
        parser.error(f"{args.source} does not say what steps cost")
    cost = calibrated(recorded).cost or recorded.cost
    seeds = range(args.seeds)
    fair = replace(recorded.server, policy="fair")
    rate = args.rate or rate_of_all(fair, cost, args.seconds, seeds)
    if args.server:
        print("\n".join(as_markdown(served_rows(cost, args.rate or rate_of_servers(cost, rate), seeds))))
        return
    print(
        f"Load 1 is {rate:.3g} requests/s. Requests in time per second, as median (lowest to highest) of the seeds:\n"
    )
    table = [["policy", *(f"load {load:g}" for load in args.loads)]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for policy, use in WAYS:
        server = replace(recorded.server, policy=policy)
        name = f"{policy}{SAYS[use]}"
        good = {
            load: [goodput(server, cost, use, load * rate, args.seconds, seed) for seed in seeds] for load in args.loads
        }
        table.append([name, *map(spread, good.values())])
        lines[name] = [(load, statistics.median(shares)) for load, shares in good.items()]
    print("\n".join(as_markdown(table)))
    if args.draw:
        args.draw.write_text(curves("Requests in time per second, by load", {"": lines}))


if __name__ == "__main__":
    main()
