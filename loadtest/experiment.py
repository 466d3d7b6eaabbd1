"""Run the points of a sweep against a server, each with its repeats, and describe the results as a report."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx

from loadtest import join
from loadtest.arrivals import STEADY, Arrivals, schedule
from loadtest.ceiling import measure_ceiling
from loadtest.client_health import VERDICTS, ProcessHealth, client_facts, verdict
from loadtest.comparison import SCHEMA
from loadtest.drive import Progress
from loadtest.errors import UsageError
from loadtest.gauges import GaugeWatch
from loadtest.http_target import HttpOptions
from loadtest.intervals import mean_interval
from loadtest.measure import QUANTILES, Slos, measure, oversaturation, steady_state
from loadtest.prompts import Call, Workload, make_calls
from loadtest.sample import Sample
from loadtest.server import addressed, client_for, first_model, reaching
from loadtest.workers import Job, Workers
from oaiserve.hosts import is_loopback

MOST_REQUESTS = 1_000_000
FEW_CORES = 4  # with at most this many cores, a server on this machine shares them with the client
OnProgress = Callable[[str, Progress, int], None]  # takes the run's title, its progress, and its number of requests
OnSamples = Callable[[str, Sequence[Sample]], None]

_RATES = ("requests_per_second", "completion_tokens_per_second", "total_tokens_per_second", "goodput_per_second")
_TIMES = ("send_lag", "submit", "ttft", "tpot", "itl", "latency")


class Experiment(Protocol):
    """Runs the points of a sweep: on a server with the processes that send to it, or on an engine in this process."""

    @property
    def settings(self) -> dict[str, Any]:
        """The part of the report about the target, without secrets."""

    def run_point(
        self, arrivals: Arrivals, num_repeats: int, label: str, on_progress: OnProgress, on_samples: OnSamples
    ) -> dict[str, Any]:
        """Run one point as often as `num_repeats`, and return it as an entry of the report's `points`."""


@contextmanager
def open_experiment(
    workload: Workload, http: HttpOptions, slos: Slos, num_warmup: int, calibrate: bool
) -> Iterator[HttpExperiment]:
    """Open an experiment: its processes and its connection to the server. Raises UsageError if no server answers, and
    StartupError if none runs on this machine and no address is given."""
    http = addressed(http)
    with client_for(http) as client, Workers(http.processes) as workers:
        experiment = HttpExperiment(client, workload, http, workers, slos, num_warmup)
        if calibrate:
            experiment.ceiling = measure_ceiling(workers, http.processes)
        yield experiment


class HttpExperiment:
    """A server and the processes that send to it. `run_point` may be called any number of times."""

    def __init__(
        self,
        client: httpx.Client,
        workload: Workload,
        http: HttpOptions,
        workers: Workers,
        slos: Slos,
        num_warmup: int,
    ) -> None:
        """Connect to the server. `client` is for requests that are not part of the load, such as /metrics. Raises
        UsageError if no server answers."""
        if http.endpoint == "chat":
            workload = replace(workload, random_form="words")
        elif workload.turns > 1:
            raise UsageError(f"--turns is {workload.turns}, which needs --endpoint chat.")
        self._client = client
        with reaching(http.url):
            self.side = join.inspect_server(client)
        self.workload = workload
        self.http = http if http.model is not None else replace(http, model=first_model(client))
        self._workers = workers
        self._slos = slos
        self._num_warmup = num_warmup
        self.ceiling: dict[str, float] | None = None
        self._num_runs = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The part of the report about the server and the requests to it, without secrets."""
        left_out = ("api_key", "header", "ca_certificate")
        return {"http": {key: value for key, value in asdict(self.http).items() if key not in left_out}}

    def run_point(
        self,
        arrivals: Arrivals,
        num_repeats: int,
        label: str,
        on_progress: OnProgress = lambda label, progress, total: None,
        on_samples: OnSamples = lambda label, samples: None,
    ) -> dict[str, Any]:
        """Run one point as often as `num_repeats`, and return it as an entry of the report's `points`."""
        runs = []
        for repeat in range(num_repeats):
            title = f"{label}, {repeat + 1} of {num_repeats}" if num_repeats > 1 else label
            run, samples = self._run(arrivals, title, on_progress)
            on_samples(title, samples)
            runs.append(run)
        return make_point(label, arrivals, runs)

    def stop(self) -> None:
        """End the run early. Call it from `on_progress`."""
        self._workers.stop()

    def _run(self, arrivals: Arrivals, title: str, on_progress: OnProgress) -> tuple[dict[str, Any], list[Sample]]:
        seed = self.workload.seed_of_run(self._num_runs)
        self._num_runs += 1
        calls, offsets = plan(self.workload, arrivals, seed)
        if self.http.endpoint == "completions" and any("messages" in call.body for call in calls):
            raise UsageError('--requests has "messages", which need --endpoint chat.')
        warmup = make_calls(replace(self.workload, num_requests=max(1, self._num_warmup)), seed + 999)
        job = Job(
            self.http,
            self.workload,
            arrivals,
            calls,
            offsets,
            warmup=warmup[: self._num_warmup],
            ask_timings=self.side.has_timings,
            slos=self._slos,
        )
        at_rest = self.side.scrape()
        before = {}

        watch = None
        if self.side.dialect is not None and self.http.scrape_seconds > 0:
            watch = GaugeWatch(self._client, self.side.dialect.gauges, self.http.scrape_seconds)
        with ExitStack() as until_end:

            def scrape() -> None:
                before.update(join.scrape_settled(self.side, at_rest, sum(1 + len(c.next_turns) for c in job.warmup)))
                if watch is not None:
                    until_end.enter_context(watch)

            samples, health = self._workers.run(job, scrape, lambda progress: on_progress(title, progress, len(calls)))
        if offsets is not None:
            offsets = offsets[: sum(sample.turn == 0 for sample in samples)]  # `stop` leaves the rest unsent
        num_ended = sum(sample.error is None or sample.status is not None for sample in samples)
        after = join.scrape_settled(self.side, before, sum(sample.is_ok for sample in samples), num_ended)
        shares_cores = is_here(self.http.url or "") and len(os.sched_getaffinity(0)) <= FEW_CORES
        run = describe_run(samples, health, arrivals, offsets, self._slos, self.ceiling, shares_cores=shares_cores)
        lag = run["client"]["processes"][0]["loop_lag_seconds"]
        run["server"] = join.join(samples, self.side, before, after, lag["p99"] if lag else 0.0)
        if watch is not None:
            run["server"]["gauges"] = watch.report(min(sample.intended_ns for sample in samples))
        _add_doubts(run, self.workload, arrivals, len(calls))
        return run, samples


def is_here(url: str) -> bool:
    """Return whether a server runs on this machine, judging by its address."""
    return is_loopback(urlsplit(url).hostname or "")


def _add_doubts(run: dict[str, Any], workload: Workload, arrivals: Arrivals, num_calls: int) -> None:
    """Mark a run as suspect if it was not what was requested, although the client kept up: a closed loop ran out of
    requests, or random prompts were found in the prefix cache."""
    client = run["client"]
    metrics = run["metrics"]
    reasons = []
    stopped = arrivals.duration_seconds
    if not arrivals.is_open and stopped is not None and metrics["window_seconds"] < stopped:
        reasons.append(f"all {num_calls} requests were sent before {stopped:g} s; raise --num-requests")
    are_random = workload.prompt is None and workload.requests is None and not workload.prefix_len
    cached = metrics["cached_tokens"] / max(1, metrics["prompt_tokens"])
    if are_random and workload.turns == 1 and cached > 0.25:
        reasons.append(f"the server knew {cached:.0%} of the prompt tokens from an earlier run; take another --seed")
    client["reasons"] += reasons
    if reasons and client["verdict"] == "valid":
        client["verdict"] = "suspect"


def plan(workload: Workload, arrivals: Arrivals, seed: int) -> tuple[list[Call], list[float] | None]:
    """Return the calls of one run and their send times (seconds), which are None for a closed loop."""
    if workload.num_requests is None and workload.requests is None and arrivals.ends_by_itself:
        num_requests = len(schedule(arrivals, MOST_REQUESTS, seed))
        if not num_requests:
            raise UsageError(
                f"--duration-seconds is {arrivals.duration_seconds:g}, in which no request is due: {arrivals.label}."
            )
        workload = replace(workload, num_requests=num_requests)
    calls = make_calls(workload, seed)
    if not arrivals.is_open:
        return calls, None
    timestamps = None
    if arrivals.arrival == "trace" and all(call.timestamp is not None for call in calls):
        calls.sort(key=lambda call: call.timestamp or 0.0)
        timestamps = [call.timestamp or 0.0 for call in calls]
    offsets = schedule(arrivals, len(calls), seed, timestamps)
    return calls[: len(offsets)], offsets


def describe_run(
    samples: Sequence[Sample],
    health: Sequence[ProcessHealth],
    arrivals: Arrivals,
    offsets: Sequence[float] | None,
    slos: Slos,
    limits: dict[str, float] | None,
    *,
    shares_cores: bool = False,
    is_in_process: bool = False,
) -> dict[str, Any]:
    """Return everything about one run except the server's view: an entry of a point's `runs`."""
    metrics = measure(samples, slos)
    has_steady_load = arrivals.arrival in STEADY or (not arrivals.is_open and not arrivals.ramp_seconds)
    metrics["steady"] = steady_state(samples) if has_steady_load else None
    facts = client_facts(samples, offsets, limits)
    processes = [process.summary() for process in health]
    judged = verdict(metrics, facts, processes, shares_cores=shares_cores, is_in_process=is_in_process)
    start_ns = min((sample.intended_ns for sample in samples), default=0)
    return {
        "metrics": metrics,
        "oversaturated": oversaturation(samples) if arrivals.arrival in STEADY else None,
        "client": facts | {"processes": processes} | judged,
        "requests": [
            {
                "intended": (sample.intended_ns - start_ns) / 1e9,
                "send_lag": sample.send_lag_ns / 1e9,
                "ttft": sample.ttft_ns / 1e9 if sample.is_ok else None,
                "tpot": sample.tpot_ns / 1e9 if sample.is_ok and sample.tpot_ns is not None else None,
                "latency": sample.latency_ns / 1e9 if sample.is_ok else None,
                "completion_tokens": sample.num_tokens,
                "error": sample.error,
                "trace_id": sample.trace_id,
                "is_traced": sample.is_traced,
                "phases": {name: phase_ns / 1e9 for name, phase_ns in sample.phases_ns.items()},
            }
            for sample in samples
        ],
    }


def make_point(label: str, arrivals: Arrivals, runs: list[dict[str, Any]]) -> dict[str, Any]:
    verdicts = [run["client"]["verdict"] for run in runs]
    return {
        "label": label,
        "arrivals": asdict(arrivals),
        "runs": runs,
        "summary": summarize(runs),
        "verdict": max(verdicts, key=VERDICTS.index),
    }


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each metric over the runs, with a 95 % interval over the repeats."""
    summary: dict[str, Any] = {}
    for name in (*_RATES, *(["sessions_per_hour"] if runs[0]["metrics"]["sessions_per_hour"] else [])):
        summary[name] = _summary_entry([run["metrics"][name] for run in runs])
    if all(run["metrics"]["steady"] for run in runs):
        steady = [run["metrics"]["steady"]["completion_tokens_per_second"] for run in runs]
        summary["steady_completion_tokens_per_second"] = _summary_entry(steady)
    summary["slo_attainment"] = _summary_entry([run["metrics"]["slo_attainment"]["all"] for run in runs], most=1.0)
    if "submit_wall_seconds" in runs[0]:  # in process
        summary["submit_wall"] = _summary_entry([run["submit_wall_seconds"] for run in runs])
    for name in _TIMES:
        distributions = [run["metrics"]["distributions"][name] for run in runs]
        distributions = [distribution for distribution in distributions if distribution is not None]
        if not distributions:
            continue
        for key in ("mean", *(f"p{q}" for q in QUANTILES), "max"):
            summary[f"{name}_{key}"] = _summary_entry([distribution[key] for distribution in distributions])
    for name in runs[0]["metrics"]["phases"]:
        distributions = [run["metrics"]["phases"][name] for run in runs if name in run["metrics"]["phases"]]
        for key in distributions[0].keys() - {"n"}:
            summary[f"phase_{name}_{key}"] = _summary_entry([distribution[key] for distribution in distributions])
    return summary


def _summary_entry(values: list[float], most: float = math.inf) -> dict[str, Any]:
    interval = mean_interval(values)
    entry: dict[str, Any] = {"mean": sum(values) / len(values), "values": values, "low": None, "high": None}
    if interval is not None:
        entry |= {"low": max(0.0, interval[0]), "high": min(most, interval[1])}
    return entry


def make_report(target: str, points: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Return the whole report, ready for JSON. `settings` are the options of the run."""
    return {
        "schema": SCHEMA,
        "target": target,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "arguments": _without_secrets(sys.argv[1:]),
        "environment": environment(),
        **settings,
        "points": points,
    }


def environment() -> dict[str, Any]:
    installed = {one.name: one.version for one in importlib.metadata.distributions()}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "versions": {name: installed.get(name) for name in ("oaiserve", "httpx", "httpcore", "uvloop")},
    }


def _without_secrets(argv: Sequence[str]) -> list[str]:
    secret = ("--api-key", "--header")
    return [
        "..."
        if i and argv[i - 1] in secret
        else (word.split("=")[0] + "=..." if word.startswith(secret) and "=" in word else word)
        for i, word in enumerate(argv)
    ]
