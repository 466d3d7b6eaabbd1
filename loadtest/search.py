"""Run a search for the highest rate on a server, and print its plan, its progress and its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from loadtest.arrivals import Arrivals
from loadtest.drive import Progress
from loadtest.errors import UsageError
from loadtest.experiment import HttpExperiment, make_point
from loadtest.find_max import (
    Bracket,
    Plan,
    RateResult,
    Trial,
    find_max,
    least_requests,
    render_plan,
    render_result,
    render_search,
    share,
)
from loadtest.measure import Slos
from loadtest.progress import ProgressLine
from loadtest.prompts import Workload, make_calls
from loadtest.report import errors_of
from oaiserve.facts.times import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Options of the search for the highest rate."""

    slo: str
    """Limits that a good request keeps, as in ttft:300ms,tpot:30ms. Metrics: ttft, tpot, itl
    (for 95 % of its gaps), latency."""

    first_rate: float = 1.0
    """First rate to try, in requests per second."""

    attainment: float = 0.95
    """Share of the requests that must be good, between 0 and 1."""

    precision: float = 0.1
    """End the search when the rate that holds and the rate that fails are this close, as a share."""

    trial_seconds: float = 10.0
    """Send at each rate for at least this long, with more than --num-requests if needed: queues take time to grow."""

    most_trials: int = 3
    """Most runs at a rate that is neither clearly good nor clearly bad."""

    max_seconds: float = 1800.0
    """End the search after this time, with what is known by then."""

    warmup: int = 4
    """Requests before each run that are not measured."""

    calibrate: bool = True
    """First measure the most that this client can do, against a server without a model."""

    json: Path | None = None
    """Write the search to this file as JSON."""

    html: Path | None = None
    """Write the rates that were tried to this file as one HTML page."""

    def __post_init__(self) -> None:
        positive = (self.first_rate, self.precision, self.max_seconds, self.most_trials)
        if not (min(positive) > 0 and 0 < self.attainment < 1):
            raise UsageError(
                "--first-rate, --precision, --max-seconds and --most-trials must be more than 0, --attainment below 1."
            )

    def plan(self, workload: Workload) -> Plan:
        """Return how many requests a decision about a rate needs. Raises UsageError if the workload has too few of
        them."""
        least = least_requests(self.attainment)
        why = (
            f"with fewer, no rate can be shown to hold for {share(self.attainment)} of the requests. A lower "
            "--attainment needs fewer."
        )
        num_requests = least if workload.num_requests is None else workload.num_requests
        if num_requests < least:
            raise UsageError(f"--num-requests is {num_requests}, but must be at least {least}: {why}")
        plan = Plan(self.attainment, num_requests, self.trial_seconds, self.most_trials, workload.turns)
        if workload.requests is None:
            return plan
        calls = make_calls(replace(workload, num_requests=plan.requests_of_trial(self.first_rate)), 0)
        if len(calls) < least:
            raise UsageError(
                f"--requests: '{workload.requests}' has {len(calls)} requests, but must have at least {least}: {why}"
            )
        return replace(plan, turns=max(1 + len(call.next_turns) for call in calls))


class RateSearch:
    """A search on a server. `points` has a point of a report for each rate that was tried."""

    def __init__(self, experiment: HttpExperiment, plan: Plan, search: Search, slos: Slos, line: ProgressLine) -> None:
        self.points: dict[float, dict[str, Any]] = {}
        self._experiment = experiment
        self._search = search
        self._slos = slos
        self._line = line
        self._plan = plan
        self._until = 0.0

    def run(self) -> Bracket:
        search = self._search
        print(render_plan(self._plan, search.slo, search.first_rate, search.max_seconds), end="", flush=True)
        self._until = monotonic() + search.max_seconds
        bracket = find_max(
            self._measure, search.first_rate, self._plan, precision=search.precision, on_result=self._show
        )
        self._line.clear()
        print(render_search(bracket, search.slo), end="")
        return bracket

    def _show(self, result: RateResult) -> None:
        self._line.clear()
        print(render_result(result), flush=True)

    def _measure(self, rate: float, number: int, may_miss: int) -> Trial:
        experiment = self._experiment
        num_requests = self._plan.requests_of_trial(rate)
        too_late = self._problem_of_time(num_requests / rate)
        if too_late:
            return Trial(0, 0, problem=f"a run at {rate:.4g} requests/s {too_late}")
        experiment.workload = replace(experiment.workload, num_requests=num_requests)
        is_over = False

        def on_progress(title: str, progress: Progress, total: int) -> None:
            nonlocal is_over
            self._line.show(title, progress, total)
            is_over = monotonic() > self._until
            if is_over or progress.num_missed > may_miss:
                experiment.stop()

        arrivals = Arrivals(arrival="poisson", rate=rate)
        point = experiment.run_point(arrivals, 1, f"trial {number + 1}, {rate:.4g} requests/s", on_progress)
        (run,) = point["runs"]
        before = self.points[rate]["runs"] if rate in self.points else []
        self.points[rate] = make_point(f"{rate:.4g} requests/s", arrivals, [*before, run])
        return trial_of(run, rate, self._slos, is_over=is_over)

    def _problem_of_time(self, seconds: float) -> str:
        left = self._until - monotonic()
        if seconds <= left:
            return ""
        return f"takes {duration(seconds * 1e9)}, and {duration(max(0.0, left) * 1e9)} are left of --max-seconds"


def trial_of(run: dict[str, Any], rate: float, slos: Slos, *, is_over: bool = False) -> Trial:
    """Return the counts of a run, or the reason why it says nothing about its rate."""
    metrics = run["metrics"]
    num_judged = metrics["num_judged"]
    num_failed = sum(metrics["errors"].values())
    problem = ""
    if is_over:
        problem = f"--max-seconds have passed, in a run at {rate:.4g} requests/s"
    elif metrics["num_ok"] == 0:
        problem = "; ".join([f"no request succeeded at {rate:.4g} requests/s", *errors_of([run])])
    elif run["client"]["verdict"] == "invalid":
        reasons = run["client"]["reasons"]
        problem = "; ".join([f"the client could not send {rate:.4g} requests/s as it should", *reasons])
    kept = metrics["slo_attainment"]
    times = {name: metrics["distributions"][name] for name in slos}
    return Trial(
        metrics["num_good"],
        num_judged,
        run["oversaturated"] is not None,
        problem,
        num_failed,
        {name: round((1 - kept[name]) * num_judged) - num_failed for name in slos},
        {name: values["p95"] for name, values in times.items() if values is not None},
    )
