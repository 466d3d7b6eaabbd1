"""Forecasts compared with the actual times, on five simulated loads or of a real server: python -m tools.forecasts

The replay (tools/replay) has the engine's scheduler, fit of the cost of steps, and forecasts; only the times of
steps and the lengths of answers are drawn. A step takes its cost times noise, on a machine whose speed drifts, and
other programs disturb some. The forecasts know neither these nor the lengths, which scatter as those of people do.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import median
from time import thread_time
from timeit import repeat
from typing import Any, NamedTuple, cast

import httpx

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.forecast.forecaster import Ended
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.explain.step_cost_fit import StepCostFit
from oaiserve.facts.forecast import Forecast
from oaiserve.facts.times import RequestTimes
from tools.charts import curves
from tools.markdown import as_markdown
from tools.replay.recorded import Arrival, Cost, RecordedServer
from tools.replay.replay import LoadReplay, Served

# A step takes 14 ms for up to 24 rows, 0.33 ms for each further one, and 60 ns for each token that a decode attends to.
STEP = StepCost(tuple(1e6 * (14 + 0.33 * max(0, rows - 24)) for rows in KNOTS), 60.0, 60.0, 20.0, 20_000.0)
COST = Cost(STEP, host_seconds=0.0008, disturbance_share=0.02)
SERVER = RecordedServer(kv_blocks=16_384, max_running=48)
CONTEXT = 16_384
NOISE = 0.03  # share of a step's time
DRIFT = 0.06  # share of the machine's speed
DRIFT_SECONDS = 20.0
RATES = {"steady": 3.0, "bursts": 2.6, "long": 1.5, "jump": 1.8, "agents": 0.3}  # requests, or sessions, per second
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
SHOWN = (0.5, 0.8, 0.9, 0.95)
HEAD = (
    "load",
    "time of",
    "promised",
    *(f"held {100 * level:.0f} %" for level in SHOWN),
    "median error",
    "median",
    "95th",
)


class Kind(NamedTuple):
    """A kind of request: lengths are lognormal, with a median and a deviation."""

    operation: str
    share: float
    prompt: tuple[float, float]
    answer: tuple[float, float]
    max_tokens: int | None = None
    grammar: str | None = None


KINDS = (
    Kind("chat", 0.6, (160, 0.8), (140, 0.7)),
    Kind("chat", 0.2, (500, 0.5), (70, 0.3), 256, "json_schema"),
    Kind("text_completion", 0.2, (90, 0.6), (400, 0.8), 64),
)
LONG = Kind("chat", 0.08, (6000, 0.4), (220, 0.5))
AGENT = Kind("chat", 1.0, (300, 0.6), (90, 0.5))
SYSTEM_PROMPT = list(range(10**18, 10**18 + 1200))  # system prompt of all agents


@dataclass(frozen=True, slots=True)
class Drawn(Arrival):
    """An arrival of one of the loads, and how many turns of its session come after it."""

    kind: Kind = AGENT
    turns_left: int = 0


class Simulation(LoadReplay):
    """A replay on a machine whose times scatter and are learnt, in which all requests are forecast."""

    def __init__(self, load: str, number: int, seed: int) -> None:
        super().__init__(SERVER, COST, forecasts_all=True)
        self._rng = random.Random(seed)
        self._load = load
        self._number = number
        self._fit = StepCostFit()
        self._drift = 0.0
        self._drift_at = 0.0
        self.forecast_seconds: list[float] = []

    def known_cost(self) -> StepCost | None:
        return self._fit.cost

    def arrivals(self) -> Iterator[tuple[float, int, Arrival]]:
        rng = self._rng
        load = self._load
        at = 0.0
        num_arrived = 0
        while num_arrived < self._number:
            rate = RATES[load] * (2 if load == "jump" and num_arrived >= self._number // 2 else 1)
            at += rng.expovariate(rate * ((4.0 if at % 30 < 5 else 0.4) if load == "bursts" else 1))
            kinds = (*KINDS, LONG) if load == "long" else KINDS
            if load == "agents":
                drawn = self._drawn(AGENT, f"agent-{rng.randrange(12)}", SYSTEM_PROMPT, rng.randrange(1, 11))
            else:
                kind = rng.choices(kinds, [kind.share for kind in kinds])[0]
                drawn = self._drawn(kind, f"key-{rng.randrange(4)}", [], 0)
            num_arrived += 1 + drawn.turns_left
            yield at, 0, drawn

    def _drawn(self, kind: Kind, client: str, before: list[int], turns_left: int) -> Drawn:
        first = self._rng.randrange(2**60)
        prompt = [*before, *range(first, first + self._length(kind.prompt, CONTEXT // 2))][: CONTEXT - 64]
        limit = kind.max_tokens or CONTEXT - len(prompt)
        options = {"most_tokens": limit, "is_limited": kind.max_tokens is not None, "operation": kind.operation}
        own = {"grammar_kind": kind.grammar, "kind": kind, "turns_left": turns_left}
        return Drawn(0.0, prompt, self._length(kind.answer, limit), client=client, **options, **own)  # type: ignore[arg-type]

    def _length(self, lognormal: tuple[float, float], most: int) -> int:
        return max(1, min(most, round(lognormal[0] * exp(self._rng.gauss(0, lognormal[1])))))

    def _seconds(self, step: Step) -> float:
        load = load_of(step)
        rng = self._rng
        share = exp((self._drift_at - self._now) / DRIFT_SECONDS)
        self._drift = self._drift * share + rng.gauss(0, DRIFT) * (1 - share * share) ** 0.5
        self._drift_at = self._now
        ns = STEP.expected_ns(load) * exp(rng.gauss(0, NOISE) + self._drift)
        lost_ns = 1e9 * self._disturbance(ns / 1e9)
        cost = self._fit.cost
        weight = max(0.01, 1 - min(1.0, lost_ns / ns)) ** 8  # as by `StepCauses`
        self._fit.observe(load, int(ns + lost_ns), weight, 0.0 if cost is None else cost.expected_ns(load) / ns - 1)
        return (ns + lost_ns) / 1e9

    def _forecast(self, *given: Any) -> Forecast:
        began = thread_time()
        forecast = super()._forecast(*given)
        self.forecast_seconds.append(thread_time() - began)
        return forecast

    def _tell_end(self, sequence: Sequence, served: Served) -> None:
        super()._tell_end(sequence, served)
        drawn = cast(Drawn, served.arrival)
        if drawn.turns_left:
            at = self._now + self._rng.lognormvariate(0.7, 0.8)  # some seconds, in which a tool runs
            left = drawn.turns_left - 1
            self._come(at, 0, self._drawn(AGENT, drawn.client, sequence.token_ids, left))


class Promised(NamedTuple):
    """A forecast, and what came."""

    forecast: Forecast
    came_ns: tuple[int, int]  # the first token and the end
    at_limit: bool  # whether its answer has ended at its limit


def promises(served: list[Served]) -> list[Promised]:
    found = []
    for one in served:
        drawn = cast(Drawn, one.arrival)
        came_ns = (round(1e9 * (one.ttft or 0)), round(1e9 * (one.latency or 0)))
        found.append(Promised(one.forecast, came_ns, drawn.answer_tokens == drawn.most_tokens))
    return found


def promises_of(url: str) -> list[Promised]:
    """Return the promises to the recent requests of a real server."""
    promised: list[Promised] = []
    for entry in httpx.get(f"{url}/debug/requests?outcome=finished", timeout=60).raise_for_status().json()["requests"]:
        respond_ns = next((phase["duration_ns"] for phase in entry["phases"] if phase["name"] == "respond"), 0)
        came = entry["time_to_first_token_ns"], entry["duration_ns"] - respond_ns
        promised.append(Promised(Forecast(**entry["forecast"]), came, "length" in entry["finish_reasons"]))
    return promised


def held_shares(promised: list[Promised], of_end: bool) -> list[tuple[float, float]]:
    """Return the shares of times that are within the intervals of each level."""
    after = [
        (one.forecast.end_after if of_end else one.forecast.first_token_after)(one.came_ns[of_end]) or 0.0
        for one in promised
    ]
    return [(level, sum(abs(one - 0.5) <= level / 2 + 1e-9 for one in after) / len(after)) for level in LEVELS]


def rows_of(name: str, found: list[Promised]) -> list[list[str]]:
    """Return the rows of a load: of the first token, and of the end if any was promised."""
    rows = []
    for of_end, what in enumerate(("first token", "end")):
        promised = [one for one in found if (one.forecast.has_end if of_end else one.forecast.is_calibrated)]
        row = [name, what, f"{len(promised):,} of {len(found):,}"]
        if not promised:
            rows.append([*row, *[""] * (len(HEAD) - 3)])
            continue
        held = dict(held_shares(promised, bool(of_end)))
        told = [(one.forecast.end_ns if of_end else one.forecast.first_token_ns) for one in promised]
        errors = [abs(ns / one.came_ns[of_end] - 1) for ns, one in zip(told, promised, strict=True)]
        came = sorted(one.came_ns[of_end] for one in promised)
        times = (f"{came[int(share * len(came))] / 1e6:,.0f} ms" for share in (0.5, 0.95))
        rows.append([*row, *(f"{held[level]:.1%}" for level in SHOWN), f"{median(errors):.1%}", *times])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="requests of each load")
    parser.add_argument("--load", choices=RATES, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draw", type=Path, metavar="SVG", help="draw there which share of the intervals held")
    parser.add_argument("--server", metavar="URL", help="the recent requests of this server in place of the loads")
    args = parser.parse_args()
    if args.server:
        print("\n".join(as_markdown([HEAD, *rows_of("server", promises_of(args.server))])))
        return
    table = [list(HEAD)]
    seconds = list[float]()
    held: dict[str, list[tuple[float, float]]] = {"as promised": [(0.0, 0.0), (1.0, 1.0)]}
    for load in args.load or RATES:
        simulation = Simulation(load, args.number, args.seed)
        replayed = simulation.run(simulation.arrivals())
        found = promises(replayed.served)
        table += rows_of(load, found)
        seconds += simulation.forecast_seconds
        calibrated = [one for one in found if one.forecast.is_calibrated]
        held[load] = [(0.0, 0.0), *held_shares(calibrated, of_end=False), (1.0, 1.0)]
        print(f"{load}: steps took {replayed.busy_share:.0%} of the time", file=sys.stderr)
    print("\n".join(as_markdown(table)))
    if args.draw:
        title = "Intervals of forecasts: the share that held, by the share promised"
        args.draw.write_text(curves(title, {"First token": held}))
    median_us = 1e6 * median(seconds)
    last_us = 1e6 * sorted(seconds)[int(0.99 * len(seconds))]
    ended = deque[Ended](maxlen=10**5)
    times = RequestTimes()
    at_end = min(repeat(lambda: ended.append(Ended("r", times, 1, True)), number=10**4)) * 100
    print(f"\nA forecast takes a tokenize worker {median_us:.0f} us (99th {last_us:.0f} us).")
    print(f"The engine thread leaves the end of a request for it in {at_end:.2f} us.")


if __name__ == "__main__":
    main()
