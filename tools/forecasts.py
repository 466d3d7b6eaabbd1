"""Forecasts beside what came of them, on five simulated loads or of a real server: python -m tools.forecasts

The scheduler, the pacing of steps, the fit of their cost and the forecasts are those of the engine; only the times of
steps and the lengths of answers are drawn. A step takes its cost times noise, on a machine whose speed drifts, and
other programs disturb some. The forecasts know neither these nor the lengths, which scatter as those of people do.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass, field
from math import exp
from statistics import median
from time import thread_time
from timeit import repeat
from typing import NamedTuple

import httpx

from oaiserve.engine.accounts.step_causes import load_of
from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.forecast.forecaster import Asked, Ended, Forecaster
from oaiserve.engine.pacing import StepTime
from oaiserve.engine.policy import POLICIES
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.explain.step_cost_fit import StepCostFit
from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.forecast import NO_FORECAST, Forecast
from oaiserve.facts.times import RequestTimes
from tools.markdown import as_markdown

# A step takes 14 ms for up to 24 rows, 0.33 ms for each further one, and 60 ns for each token that a decode attends to.
COST = StepCost(tuple(1e6 * (14 + 0.33 * max(0, rows - 24)) for rows in KNOTS), 60.0, 60.0, 20.0, 20_000.0)
LIMITS, KV_BLOCKS, CONTEXT = Limits(max_running=48, max_step_tokens=512), 16_384, 16_384
NOISE, DRIFT, DRIFT_SECONDS = 0.03, 0.06, 20.0  # of a step, and of the machine's speed: shares
DISTURBANCE_SHARE, DISTURBANCE_SECONDS = 0.02, 0.02  # that others add to the time, and one disturbance
HOST_SECONDS = 0.0008  # between two steps
RATES = {"steady": 3.0, "bursts": 2.6, "long": 1.5, "jump": 1.8, "agents": 0.3}  # requests, or sessions, per second
LEVELS = (0.5, 0.8, 0.9, 0.95)
HEAD = ("load", "time of", "promised", *(f"held {100 * level:.0f} %" for level in LEVELS), "median error",
        "at the limit", "of the length alone", "median", "95th")  # fmt: skip


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
LONG, AGENT = Kind("chat", 0.08, (6000, 0.4), (220, 0.5)), Kind("chat", 1.0, (300, 0.6), (90, 0.5))
SYSTEM_PROMPT = list(range(10**18, 10**18 + 1200))  # of all agents


@dataclass(slots=True)
class Coming:
    """A request on its way, and then what was forecast and what came."""

    number: int
    kind: Kind
    client: str
    prompt: list[int]
    answer_tokens: int
    turns_left: int = 0  # of its session, whose next turn goes on from its prompt and its answer
    forecast: Forecast = NO_FORECAST
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def limit(self) -> int:
        return self.kind.max_tokens or CONTEXT - len(self.prompt)


class Simulation:
    """An engine without a model, whose requests are forecast. Use it once."""

    def __init__(self, load: str, number: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._fit = StepCostFit()
        self._scheduler = Scheduler(BlockPool(KV_BLOCKS, 16), LIMITS, policy=POLICIES["fair"])
        self._scheduler.step_time = StepTime(lambda: self._fit.cost, None, LIMITS.max_step_tokens)
        self.numbers = EngineNumbers()
        self._step: tuple[Step | None, int] = (None, 0)
        known = (lambda: self._fit.cost, self.numbers.copy, lambda: self._step)
        self._forecaster = Forecaster(self._scheduler, self._scheduler.step_time.copy(), *known)
        self._open: dict[Sequence, Coming] = {}
        self.now, self._drift, self._drift_at = 0.0, 0.0, 0.0
        self._num_made = 0
        self._coming: list[tuple[float, int, Coming]] = []
        at = 0.0
        for index in range(number):
            rate = RATES[load] * (2 if load == "jump" and index >= number // 2 else 1)
            at += self._rng.expovariate(rate * ((4.0 if at % 30 < 5 else 0.4) if load == "bursts" else 1))
            self._arrive(at, *self._drawn(load))
        self.ended: list[Coming] = []
        self.forecast_seconds: list[float] = []

    def _drawn(self, load: str) -> tuple[Kind, str, list[int], int]:
        rng = self._rng
        if load == "agents":
            return AGENT, f"agent-{rng.randrange(12)}", SYSTEM_PROMPT, rng.randrange(1, 11)
        kinds = (*KINDS, LONG) if load == "long" else KINDS
        return rng.choices(kinds, [kind.share for kind in kinds])[0], f"key-{rng.randrange(4)}", [], 0

    def _arrive(self, at: float, kind: Kind, client: str, before: list[int], turns_left: int) -> None:
        first = self._rng.randrange(2**60)
        prompt = [*before, *range(first, first + self._length(kind.prompt, CONTEXT // 2))]
        coming = Coming(self._num_made, kind, client, prompt[: CONTEXT - 64], 0, turns_left)
        coming.answer_tokens = self._length(kind.answer, coming.limit)
        self._num_made += 1
        heapq.heappush(self._coming, (at, coming.number, coming))

    def _length(self, lognormal: tuple[float, float], most: int) -> int:
        return max(1, min(most, round(lognormal[0] * exp(self._rng.gauss(0, lognormal[1])))))

    def run(self, number: int) -> None:
        """Serve until so many requests have ended."""
        while len(self.ended) < number and (self._coming or self._open):
            if (step := self._scheduler.schedule()) is None:
                self.now = max(self.now, self._coming[0][0])
                self._add(self._arrived())
                continue
            self._step = step, int(self.now * 1e9)
            self.now += self._seconds(step)
            arrived = self._arrived()  # their forecasts are made during the step
            self._step = None, 0
            self._commit(step)
            self._add(arrived)
            self.now += HOST_SECONDS

    def _arrived(self) -> list[Coming]:
        arrived = []
        while self._coming and self._coming[0][0] <= self.now:
            at, _, coming = heapq.heappop(self._coming)
            received_ns, kind = int(at * 1e9), coming.kind
            given = (kind.operation, kind.grammar, [coming.prompt], coming.limit, kind.max_tokens is not None)
            asked = Asked(f"{coming.number}", coming.client, *given, True, 1, "", received_ns)
            began = thread_time()
            coming.forecast = self._forecaster.forecast(asked, received_ns)
            self.forecast_seconds.append(thread_time() - began)
            coming.times = RequestTimes(received=received_ns)
            arrived.append(coming)
        return arrived

    def _add(self, arrived: list[Coming]) -> None:
        for coming in arrived:
            name, ids, params = f"{coming.number}", coming.prompt, SamplingParams()
            one = Sequence(name, 0, ids, params, max_len=len(ids) + coming.limit, client_name=coming.client)
            self._scheduler.add(one)
            self._open[one] = coming

    def _seconds(self, step: Step) -> float:
        load, rng = load_of(step), self._rng
        kept = exp((self._drift_at - self.now) / DRIFT_SECONDS)
        self._drift = self._drift * kept + rng.gauss(0, DRIFT) * (1 - kept * kept) ** 0.5
        self._drift_at = self.now
        ns = COST.expected_ns(load) * exp(rng.gauss(0, NOISE) + self._drift)
        left, lost_ns = ns / 1e9 * DISTURBANCE_SHARE / DISTURBANCE_SECONDS, 0.0
        while (left := left - rng.expovariate(1)) > 0:
            lost_ns += rng.expovariate(1 / DISTURBANCE_SECONDS) * 1e9
        cost, took_ns = self._fit.cost, int(ns + lost_ns)
        weight = max(0.01, 1 - min(1.0, lost_ns / ns)) ** 8  # as by `StepCauses`
        self._fit.observe(load, took_ns, weight, 0.0 if cost is None else cost.expected_ns(load) / ns - 1)
        self.numbers.num_steps += 1
        self.numbers.model_ns += took_ns
        self.numbers.idle_with_work_ns += int(HOST_SECONDS * 1e9)
        self.numbers.num_step_sequences += len(step.chunks)
        return took_ns / 1e9

    def _commit(self, step: Step) -> None:
        self._scheduler.advance(step)
        for chunk in step.chunks:
            one, token_ids = chunk.sequence, [self._rng.randrange(2**60)] if chunk.max_draws else []
            self._scheduler.commit(chunk, token_ids)
            if not token_ids:
                continue
            coming, now_ns = self._open[one], int(self.now * 1e9)
            coming.times.first_token = coming.times.first_token or now_ns
            if one.num_generated >= coming.answer_tokens:
                coming.times.last_token = now_ns
                self._scheduler.remove(one)
                self.ended.append(self._open.pop(one))
                self._forecaster.ended.append(Ended(one.request_id, coming.times, coming.answer_tokens, True))
                if coming.turns_left:
                    at = self.now + self._rng.lognormvariate(0.7, 0.8)  # some seconds, in which a tool runs
                    self._arrive(at, AGENT, coming.client, one.token_ids, coming.turns_left - 1)
                coming.prompt = []


class Promised(NamedTuple):
    """A forecast, and what came."""

    forecast: Forecast
    first_ns: int
    end_ns: int
    at_limit: bool  # whether its answer has ended at its limit
    alone: float | None = None  # the error of whoever knows how lengths are distributed, of the length alone


def promises(simulation: Simulation) -> list[Promised]:
    found: list[Promised] = []
    for one in simulation.ended:
        first_ns, end_ns = (
            (stamp or 0) - (one.times.received or 0) for stamp in (one.times.first_token, one.times.last_token)
        )
        usual = min(one.kind.answer[0], one.limit)  # half of such answers are longer: more can nobody know of one
        at_limit, alone = one.answer_tokens == one.limit, abs(usual / one.answer_tokens - 1)
        found.append(Promised(one.forecast, first_ns, end_ns, at_limit, alone))
    return found


def promises_of(url: str) -> list[Promised]:
    """Return the promises to the recent requests of a real server."""
    found: list[Promised] = []
    for entry in httpx.get(f"{url}/debug/requests?outcome=finished", timeout=60).raise_for_status().json()["requests"]:
        respond_ns = next((phase["duration_ns"] for phase in entry["phases"] if phase["name"] == "respond"), 0)
        told, first_ns = Forecast(**entry["forecast"]), entry["time_to_first_token_ns"]
        found.append(Promised(told, first_ns, entry["duration_ns"] - respond_ns, "length" in entry["finish_reasons"]))
    return found


def rows_of(name: str, found: list[Promised]) -> list[list[str]]:
    """Return the two rows of a load: of the first token and of the end."""
    promised = [one for one in found if one.forecast.is_calibrated]
    if not promised:
        return [[name, "", f"0 of {len(found)}", *[""] * (len(HEAD) - 3)]]
    rows = []
    for what in ("first token", "end"):
        is_end = what == "end"
        came_ns = [one.end_ns if is_end else one.first_ns for one in promised]
        told_ns = [one.forecast.end_ns if is_end else one.forecast.first_token_ns for one in promised]
        after = [
            (one.forecast.end_after if is_end else one.forecast.first_token_after)(ns) or 0.0
            for one, ns in zip(promised, came_ns, strict=True)
        ]
        errors = [abs(told / came - 1) for told, came in zip(told_ns, came_ns, strict=True)]
        row = [name, what, f"{len(promised):,} of {len(found):,}"]
        for level in LEVELS:
            row.append(f"{sum(abs(one - 0.5) <= level / 2 + 1e-9 for one in after) / len(after):.1%}")
        at_limit = [error for error, one in zip(errors, promised, strict=True) if one.at_limit and is_end]
        alone = [one.alone for one in promised if one.alone is not None and is_end]
        row += [f"{median(values):.1%}" if values else "" for values in (errors, at_limit, alone)]
        rows.append([*row, *(f"{sorted(came_ns)[int(share * len(came_ns))] / 1e6:,.0f} ms" for share in (0.5, 0.95))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000, help="requests of each load")
    parser.add_argument("--load", choices=RATES, action="append", help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--server", metavar="URL", help="the recent requests of this server in place of the loads")
    args = parser.parse_args()
    if args.server:
        print("\n".join(as_markdown([HEAD, *rows_of("server", promises_of(args.server))])))
        return
    table, seconds = [list(HEAD)], []
    for load in args.load or RATES:
        simulation = Simulation(load, args.number, args.seed)
        simulation.run(args.number)
        table += rows_of(load, promises(simulation))
        seconds += simulation.forecast_seconds
        busy_share = simulation.numbers.model_ns / 1e9 / simulation.now
        print(f"{load}: {simulation.now:,.0f} s, of which steps took {busy_share:.0%}", file=sys.stderr)
    print("\n".join(as_markdown(table)))
    ended = simulation._forecaster.ended
    times = RequestTimes()
    at_end = min(repeat(lambda: ended.append(Ended("r", times, 1, True)), number=10**4)) * 100
    median_us, last_us = 1e6 * median(seconds), 1e6 * sorted(seconds)[int(0.99 * len(seconds))]
    print(f"\nA forecast takes a tokenize worker {median_us:.0f} us (99th {last_us:.0f} us).")
    print(f"The engine thread leaves the end of a request for it in {at_end:.2f} us.")


if __name__ == "__main__":
    main()
