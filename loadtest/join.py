"""Put the server's view of a run next to the client's: its /metrics before and after, and the phases of each request.
The two views must agree, apart from the time on the network."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from loadtest.gauges import Gauges
from loadtest.measure import distribution
from loadtest.metrics_page import Metrics, parse_metrics
from loadtest.sample import Sample

SETTLE_SECONDS = 2.0  # longest wait for a server's metrics to catch up with its answers
READ_AGAIN_TOKENS = "oaiserve_prompt_tokens_read_again_total"
READ_AGAIN_SECONDS = "oaiserve_prompt_read_again_seconds_total"
UNTIL_FIRST_TOKEN = ("receive", "tokenize_wait", "tokenize", "encode_media", "queue", "prefill")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names that one kind of server gives to its histograms and gauges."""

    name: str
    ttft: str
    duration: str
    tokens: tuple[str, str]  # histograms of prompt tokens and of answer tokens
    phases: dict[str, tuple[str, tuple[tuple[str, str], ...]]]  # histogram and labels of each phase
    gauges: Gauges
    only: tuple[tuple[str, str], ...] = ()  # labels that select the finished requests in every histogram

    @property
    def signs(self) -> set[str]:
        """The metrics that identify such a server. A gateway for several servers has others, and so no times to
        compare."""
        return {self.gauges.running, f"{self.duration}_count"}


_OUR_PHASES = (*UNTIL_FIRST_TOKEN, "decode", "respond")
DIALECTS = (
    Dialect(
        "oaiserve",
        "oaiserve_time_to_first_token_seconds",
        "oaiserve_request_duration_seconds",
        ("oaiserve_request_prompt_tokens", "oaiserve_request_generation_tokens"),
        {phase: ("oaiserve_request_phase_seconds", (("phase", phase),)) for phase in _OUR_PHASES},
        Gauges("oaiserve_requests_running", "oaiserve_requests_waiting", "oaiserve_kv_cache_usage_ratio"),
        only=(("outcome", "finished"),),
    ),
    Dialect(
        "vllm",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        ("vllm:request_prompt_tokens", "vllm:request_generation_tokens"),
        {phase: (f"vllm:request_{phase}_time_seconds", ()) for phase in ("queue", "prefill", "decode")},
        Gauges("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    ),
)


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's metrics, and what is needed to compare them with the client's figures."""

    dialect: Dialect | None  # None: the names of the server's request times are unknown
    round_trip_seconds: float  # time of a small request to the idle server
    scrape: Callable[[], Metrics] = field(default=dict)  # {} if the server does not answer
    has_timings: bool = False  # whether it supports stream_options.include_timings


def inspect_server(client: httpx.Client) -> ServerSide:
    """Find out which metrics the server has and how long a round trip takes. `client` has the server's base URL.

    Raises httpx.HTTPError if the server does not answer now. Later scrapes never raise, so that the report is not lost
    when a server dies under the load. A server without /metrics is accepted, but the client's figures are then not
    checked.
    """

    def scrape() -> Metrics:
        try:
            response = client.get("/metrics")
        except httpx.HTTPError:
            return {}
        return parse_metrics(response.text) if response.status_code == 200 else {}

    round_trips = []
    for _ in range(5):
        started = time.monotonic()
        client.get("/health")
        round_trips.append(time.monotonic() - started)
    names = {name for name, _ in scrape()}
    dialect = next((dialect for dialect in DIALECTS if dialect.signs & names), None)
    has_timings = any(name.startswith("oaiserve_") for name in names)
    return ServerSide(dialect, min(round_trips), scrape, has_timings)


def histogram_change(
    before: Metrics, after: Metrics, name: str, labels: Sequence[tuple[str, str]]
) -> tuple[int, float]:
    """Return the count and the sum of the observations between two scrapes, over all series that have these
    labels."""

    def total(metrics: Metrics, suffix: str) -> float:
        return sum(v for (n, own_labels), v in metrics.items() if n == name + suffix and own_labels.issuperset(labels))

    return (
        round(total(after, "_count") - total(before, "_count")),
        total(after, "_sum") - total(before, "_sum"),
    )


def scrape_settled(side: ServerSide, before: Metrics, num_finished: int, num_ended: int = 0) -> Metrics:
    """Scrape until the metrics include all requests of the run, for at most two seconds, and return the last scrape.

    The client got `num_finished` whole answers. The server may count more, because it may have finished an abandoned
    answer. So it must also count `num_ended` requests with any outcome, if its metrics have outcomes.
    """
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        after = side.scrape()
        if side.dialect is None or time.monotonic() > deadline:
            return after
        finished, _ = histogram_change(before, after, side.dialect.duration, side.dialect.only)
        ended, _ = histogram_change(before, after, side.dialect.duration, ())
        if finished >= num_finished and (ended >= num_ended or not side.dialect.only):
            return after
        time.sleep(0.05)


def join(
    samples: Sequence[Sample], side: ServerSide, before: Metrics, after: Metrics, loop_lag_seconds: float
) -> dict[str, Any]:
    """Return the server's view of one run (seconds), and whether it agrees with the client's. `loop_lag_seconds` is how
    late the client's event loop may have been."""
    ok = [sample for sample in samples if sample.is_ok]
    joined: dict[str, Any] = {"dialect": None, "round_trip_seconds": side.round_trip_seconds, "rest": unaccounted(ok)}
    if side.dialect is None:
        return joined | {"check": _check("not checked", "its /metrics has no times of requests that are known here")}
    if not before or not after:
        return joined | {"check": _check("not checked", "the server did not answer /metrics before and after the run")}
    dialect = side.dialect
    changes = {
        name: histogram_change(before, after, metric, (*labels, *dialect.only))
        for name, (metric, labels) in {
            "ttft": (dialect.ttft, ()),
            "duration": (dialect.duration, ()),
            **dialect.phases,
        }.items()
    }
    means = {name: seconds / count if count else None for name, (count, seconds) in changes.items()}
    joined |= {"dialect": dialect.name, "num_requests": changes["duration"][0], "means": means}
    joined["others"] = _others(samples, joined["num_requests"], dialect, before, after)
    joined |= {"read_again": read_again(before, after)} if dialect.name == "oaiserve" else {}
    return joined | {"check": _compare(samples, ok, joined, loop_lag_seconds)}


def _others(
    samples: Sequence[Sample], num_finished: int, dialect: Dialect, before: Metrics, after: Metrics
) -> dict[str, Any] | None:
    """Return how many of the finished requests came from other clients, at least, and their share of the tokens; None
    if there were none. The share is None unless the tokens of all of this client's requests are known."""
    num_others = num_finished - len(samples)
    if num_others <= 0:
        return None
    share = None
    if all(sample.is_ok and sample.completion_tokens is not None for sample in samples):
        changes = [histogram_change(before, after, name, dialect.only) for name in dialect.tokens]
        num_tokens = sum(tokens for _, tokens in changes)
        num_own = sum(sample.prompt_tokens + sample.num_tokens for sample in samples)
        if num_tokens > num_own:
            share = 1 - num_own / num_tokens
    return {"num_requests": num_others, "token_share": share}


def read_again(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Return, by reason, the prompt tokens that oaiserve computed again although an earlier prompt had computed them,
    and the seconds that this took."""
    tokens: dict[str, int] = {}
    seconds = 0.0
    for (name, labels), value in after.items():
        change = value - before.get((name, labels), 0.0)
        if name == READ_AGAIN_TOKENS and change:
            reason = dict(labels)["reason"]
            tokens[reason] = tokens.get(reason, 0) + round(change)
        elif name == READ_AGAIN_SECONDS:
            seconds += change
    return {"tokens": tokens, "seconds": seconds}


def unaccounted(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the time that no phase accounts for. Until the first token, it is spent in the network and the client; for
    the whole request, it also includes the server's time from the last token to the last byte. Requests without phases
    are left out. So are, until the first token, requests with reasoning or tool calls, whose first token may not be an
    output."""
    first = []
    whole = []
    for sample in samples:
        phases = sample.phases_ns
        if sample.is_stream and "prefill" in phases:
            known_ns = sum(phases.get(name, 0) for name in UNTIL_FIRST_TOKEN)
            if not sample.is_parsed:
                first.append((sample.ttft_ns - sample.send_lag_ns - known_ns) / 1e9)
            if "decode" in phases:
                whole.append((sample.end_ns - sample.sent_ns - known_ns - phases["decode"]) / 1e9)
    return {"first_token": distribution(first), "last_token": distribution(whole)}


def _compare(samples: Sequence[Sample], ok: Sequence[Sample], joined: dict[str, Any], lag: float) -> dict[str, Any]:
    if not ok:
        return _check("not checked", "no request succeeded")
    counted = joined["num_requests"]
    said = f"the server counted {counted} finished requests, the client {len(ok)}"
    if (others := joined["others"]) is not None:
        share = others["token_share"]
        of_tokens = "" if share is None else f", with {share:.0%} of their tokens"
        return _check("disagree", f"{said}: {others['num_requests']} came from another client{of_tokens}")
    if counted < len(ok):
        return _check("disagree", f"{said}: was it restarted, or do several servers answer?")
    if counted != len(ok):
        return _check("not checked", said)
    problems = []
    views = [("duration", statistics.fmean((s.end_ns - s.sent_ns) / 1e9 for s in ok))]
    if all(sample.is_stream and not sample.is_parsed for sample in ok):
        views.append(("ttft", statistics.fmean((s.ttft_ns - s.send_lag_ns) / 1e9 for s in ok)))
    for name, client_mean in views:
        server_mean = joined["means"][name]
        if server_mean is None:
            continue
        network = client_mean - server_mean
        allowed = 3 * joined["round_trip_seconds"] + lag + max(0.005, 0.05 * client_mean)
        if not -0.001 <= network <= allowed:
            problems.append(
                f"mean {name}: the client measured {client_mean:.4f} s, the server {server_mean:.4f} s; the network "
                f"may explain 0 to {allowed:.4f} s, not {network:.4f} s"
            )
    return _check("disagree", "; ".join(problems)) if problems else _check("agree", "")


def _check(status: str, reason: str) -> dict[str, str]:
    return {"status": status, "reason": reason}
