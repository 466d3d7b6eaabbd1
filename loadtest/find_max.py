"""The highest rate that a server takes within its SLOs: first doubled until it fails, then bisected.

A rate holds when the share of good requests is, with 95 % confidence, at least what was asked; it fails when it is,
with the same confidence, less, or when requests pile up. In between it is measured again, and what stays open counts as
a fail.
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
    is_valid: bool = True  # the client could keep up


@dataclass(slots=True)
class Step:
    """A rate (requests per second), what was measured there, and what that means."""

    rate: float
    holds: bool
    num_good: int
    num_judged: int
    low: float  # of the interval of the share
    high: float
    reason: str


@dataclass(slots=True)
class Bracket:
    """`holds` is the highest rate found good, `fails` the lowest found bad; None: there was none."""

    holds: float | None = None
    fails: float | None = None
    steps: list[Step] = field(default_factory=list)
    problem: str = ""  # why the search ended early


def find_max(
    measure: Callable[[float, int], Trial],
    first_rate: float,
    *,
    attainment: float = 0.95,
    precision: float = 0.1,
    most_trials: int = 3,
    on_step: Callable[[Step], None] = lambda step: None,
) -> Bracket:
    """`measure(rate, number)` tries a rate; `number` counts the trials of all rates. Ends when the bracket's ends are
    within `precision` (as a share) of each other."""
    bracket, count = Bracket(), 0

    def try_rate(rate: float) -> bool:
        nonlocal count
        good = judged = 0
        for _ in range(most_trials):
            trial = measure(rate, count)
            count += 1
            if not trial.is_valid:
                bracket.problem = f"the client could not send {rate:.4g} requests/s as it should; use more --processes"
                return False
            good, judged = good + trial.num_good, judged + trial.num_judged
            low, high = wilson_interval(good, judged)
            reason = "piles up" if trial.oversaturated else "holds" if low >= attainment else "misses"
            if reason != "misses" or high < attainment:
                break
        else:
            reason = "undecided"
        holds = reason == "holds"
        bracket.steps.append(Step(rate, holds, good, judged, low, high, reason))
        on_step(bracket.steps[-1])
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


def render_step(step: Step) -> str:
    """One line."""
    return (
        f"{step.rate:9.4g} requests/s: {step.reason:9} {step.num_good} of {step.num_judged} good "
        f"({step.low:.1%} .. {step.high:.1%})"
    )


def render_search(bracket: Bracket, slo: str, attainment: float) -> str:
    """The answer."""
    lines = []
    if bracket.problem:
        lines.append(f"Ended early: {bracket.problem}.")
    holds = f"{bracket.holds:.4g}" if bracket.holds is not None else "no rate that was tried"
    fails = f"{bracket.fails:.4g} does not" if bracket.fails is not None else "no limit was found above"
    lines.append(f"{slo} for {attainment:.0%} of the requests: {holds} requests/s holds, {fails}.")
    return "\n".join(lines) + "\n"
