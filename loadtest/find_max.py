"""Search for the highest rate at which a server keeps its SLOs: double the rate until it fails, then bisect.

A rate holds when the share of good requests is, with 95 % confidence, at least the required one. It fails when the
share is lower with the same confidence, or when requests pile up. If neither is certain, the rate is measured again; a
rate that stays undecided counts as failed. A trial stops at once when the rate has so many misses that it can no longer
hold.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from loadtest.intervals import wilson_interval
from oaiserve.facts.times import duration

MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement at one rate."""

    num_good: int
    num_judged: int
    oversaturated: bool = False
    problem: str = ""  # why the trial says nothing about the rate, so that the search must end
    num_failed: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)  # answers that missed a limit, by its metric
    p95: Mapping[str, float] = field(default_factory=dict)  # seconds, of the metrics with a limit


@dataclass(frozen=True, slots=True)
class Plan:
    """How many requests a decision about a rate needs."""

    attainment: float
    num_requests: int  # least number of requests in a trial
    trial_seconds: float  # least duration of a trial
    most_trials: int
    turns: int = 1  # turns per conversation; the other numbers count a conversation as one request

    def requests_of_trial(self, rate: float) -> int:
        return max(self.num_requests, round(rate * self.trial_seconds))

    def judged_in_trial(self, rate: float) -> int:
        """Return the most requests that a trial can judge, counting each turn of a conversation."""
        return self.requests_of_trial(rate) * self.turns

    def most_misses(self, rate: float) -> int:
        """Return how many misses a rate may have in all its trials and still hold; -1 if it can never hold."""
        return most_misses(self.judged_in_trial(rate) * self.most_trials, self.attainment)

    def seconds_at(self, rate: float) -> float:
        """Return how long all trials of a rate take to send."""
        return self.requests_of_trial(rate) / rate * self.most_trials


@dataclass(slots=True)
class RateResult:
    """A rate (requests per second), the counts of its trials, and the decision."""

    rate: float
    holds: bool
    num_good: int
    num_judged: int
    low: float  # ends of the 95 % interval of the share of good requests
    high: float
    reason: str
    num_failed: int = 0
    missed: Mapping[str, int] = field(default_factory=dict)
    p95: Mapping[str, float] = field(default_factory=dict)  # seconds, in the last trial


@dataclass(slots=True)
class Bracket:
    """The result of a search: `holds` is the highest rate that holds, `fails` the lowest that fails; None if there was
    no such rate. `attainment` is the share of requests that a rate must keep within the limits."""

    attainment: float
    holds: float | None = None
    fails: float | None = None
    steps: list[RateResult] = field(default_factory=list)
    problem: str = ""  # why the search ended early


Measure = Callable[[float, int, int], Trial]  # takes a rate, the trial's number, and the allowed number of misses


def least_requests(attainment: float) -> int:
    """Return how many requests are needed to show that a rate holds if all of them are good."""
    return next(number for number in itertools.count(1) if most_misses(number, attainment) >= 0)


def most_misses(num_requests: int, attainment: float) -> int:
    """Return how many of `num_requests` may miss if a rate is to hold; -1 if there are too few for any rate to hold."""
    holds = (wilson_interval(num_requests - misses, num_requests)[0] >= attainment for misses in itertools.count())
    return sum(itertools.takewhile(bool, holds)) - 1


def find_max(
    measure: Measure,
    first_rate: float,
    plan: Plan,
    *,
    precision: float = 0.1,
    on_result: Callable[[RateResult], None] = lambda result: None,
) -> Bracket:
    """Return a bracket around the highest rate that holds; its ends are within `precision` (as a share) of each other.
    Trials are numbered over all rates."""
    bracket = Bracket(plan.attainment)
    numbers = itertools.count()

    def try_rate(rate: float) -> bool:
        most = plan.most_misses(rate)
        good = judged = failed = 0
        missed: Counter[str] = Counter()
        for _ in range(plan.most_trials):
            trial = measure(rate, next(numbers), most - (judged - good))
            if trial.problem:
                bracket.problem = trial.problem
                return False
            good += trial.num_good
            judged += trial.num_judged
            failed += trial.num_failed
            missed.update(trial.missed)
            low, high = wilson_interval(good, judged)
            reason = "piles up" if trial.oversaturated else "holds" if low >= plan.attainment else "misses"
            if reason != "misses" or high < plan.attainment:
                break
            if judged - good > most:
                reason = "dropped"
                break
        else:
            reason = "undecided"
        holds = reason == "holds"
        result = RateResult(rate, holds, good, judged, low, high, reason, failed, dict(missed), dict(trial.p95))
        bracket.steps.append(result)
        on_result(result)
        if holds:
            bracket.holds = rate
        else:
            bracket.fails = rate
        return holds

    rate = first_rate
    for _ in range(MOST_DOUBLINGS):
        holds = try_rate(rate)
        if bracket.problem:
            return bracket
        if bracket.holds is not None and bracket.fails is not None:
            break
        rate = rate * 2 if holds else rate / 2
    while bracket.holds is not None and bracket.fails is not None and bracket.fails > bracket.holds * (1 + precision):
        rate = (bracket.holds * bracket.fails) ** 0.5
        try_rate(rate)
        if bracket.problem:
            return bracket
    return bracket


def render_plan(plan: Plan, slo: str, first_rate: float, max_seconds: float) -> str:
    """Return as text the goal of the search, the number of requests per decision and the maximum duration."""
    least = least_requests(plan.attainment)
    num_requests = plan.judged_in_trial(first_rate)
    total = num_requests * plan.most_trials
    most = plan.most_misses(first_rate)
    return (
        f"Searching for the highest rate at which {share(plan.attainment)} of the requests keep {slo}.\n"
        f"A decision needs at least {least} requests. A rate holds after {num_requests} without a miss, or after up to "
        f"{total} with at most {most};\nit is dropped at miss {most + 1}. At {first_rate:.4g} requests/s that takes at "
        f"most {_seconds(plan.seconds_at(first_rate))}, and the whole search at most {_seconds(max_seconds)} "
        "(--max-seconds).\n"
    )


def render_result(result: RateResult) -> str:
    """Return the result of one rate as a line of text, with the limits that were missed."""
    misses = [
        f"{metric} missed by {number}" + (f" (p95 {_seconds(result.p95[metric])})" if metric in result.p95 else "")
        for metric, number in result.missed.items()
        if number
    ]
    misses += [f"{result.num_failed} failed"] if result.num_failed else []
    return (
        f"{result.rate:9.4g} requests/s: {result.reason:9} {result.num_good} of {result.num_judged} good "
        f"({result.low:.1%} .. {result.high:.1%})" + (": " if misses else "") + ", ".join(misses)
    )


def render_search(bracket: Bracket, slo: str) -> str:
    """Return the answer of the search as text."""
    lines = []
    if bracket.problem:
        lines.append(f"Ended early: {bracket.problem}.")
    lines.append(f"{slo} for {share(bracket.attainment)} of the requests: {answer(bracket)}.")
    return "\n".join(lines) + "\n"


def answer(bracket: Bracket) -> str:
    holds = f"{bracket.holds:.4g} requests/s" if bracket.holds is not None else "no rate that was tried"
    fails = f"{bracket.fails:.4g} does not" if bracket.fails is not None else "no limit was found above"
    return f"{holds} holds, {fails}"


def share(value: float) -> str:
    """Return a share as a percentage without superfluous digits: 95%, 99.9%."""
    return f"{value * 100:.6g}%"


def _seconds(seconds: float) -> str:
    return duration(seconds * 1e9)
