"""Search for the highest rate at which a server keeps its SLOs: double the rate until it fails, then bisect.

A rate holds when the share of good requests is, with 95 % confidence, at least the required one. It fails when the
share is lower with the same confidence, or when requests pile up. If neither is certain, the rate is measured again;
a rate that stays undecided counts as failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadtest.intervals import wilson_interval

MOST_DOUBLINGS = 20


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement at one rate."""

    num_good: int
    num_judged: int
    oversaturated: bool = False
    problem: str = ""  # why it says nothing about the rate, and the search has to end


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


@dataclass(slots=True)
class Bracket:
    """The result of a search: `holds` is the highest rate that holds, `fails` the lowest that fails; None if there was
    no such rate."""

    holds: float | None = None
    fails: float | None = None
    steps: list[RateResult] = field(default_factory=list)
    problem: str = ""  # why the search ended early


def find_max(
    measure: Callable[[float, int], Trial],
    first_rate: float,
    *,
    attainment: float = 0.95,
    precision: float = 0.1,
    most_trials: int = 3,
    on_result: Callable[[RateResult], None] = lambda result: None,
) -> Bracket:
    """Return a bracket around the highest rate that holds; its ends are within `precision` (as a share) of each other.
    `measure(rate, number)` tries a rate; `number` counts the trials of all rates."""
    bracket = Bracket()
    count = 0

    def try_rate(rate: float) -> bool:
        nonlocal count
        good = judged = 0
        for _ in range(most_trials):
            trial = measure(rate, count)
            count += 1
            if trial.problem:
                bracket.problem = trial.problem
                return False
            good += trial.num_good
            judged += trial.num_judged
            low, high = wilson_interval(good, judged)
            reason = "piles up" if trial.oversaturated else "holds" if low >= attainment else "misses"
            if reason != "misses" or high < attainment:
                break
        else:
            reason = "undecided"
        holds = reason == "holds"
        bracket.steps.append(RateResult(rate, holds, good, judged, low, high, reason))
        on_result(bracket.steps[-1])
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


def render_result(result: RateResult) -> str:
    """Return the result of one rate as a line of text."""
    return (
        f"{result.rate:9.4g} requests/s: {result.reason:9} {result.num_good} of {result.num_judged} good "
        f"({result.low:.1%} .. {result.high:.1%})"
    )


def render_search(bracket: Bracket, slo: str, attainment: float) -> str:
    """Return the answer of the search as text."""
    lines = []
    if bracket.problem:
        lines.append(f"Ended early: {bracket.problem}.")
    holds = f"{bracket.holds:.4g} requests/s" if bracket.holds is not None else "no rate that was tried"
    fails = f"{bracket.fails:.4g} does not" if bracket.fails is not None else "no limit was found above"
    lines.append(f"{slo} for {attainment:.0%} of the requests: {holds} holds, {fails}.")
    return "\n".join(lines) + "\n"
