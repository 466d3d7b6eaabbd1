"""Compute the metrics of one run from its samples. Pure functions; docs/loadtest.md defines the metrics in words."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from loadtest.errors import UsageError
from loadtest.intervals import percentile
from loadtest.sample import Sample
from oaiserve.wire import slos

QUANTILES = (50, 90, 95, 99)
LEAST_STEADY = 10  # least number of answers for which a steady state is reported

Slos = slos.Slos


def parse_slos(text: str | None) -> Slos:
    """Parse the value of --slo, as in "ttft:300ms,tpot:30ms", into seconds by metric. Raises UsageError."""
    try:
        return slos.parse(text or "")
    except ValueError as error:
        raise UsageError(str(error)) from error


def measure(samples: Sequence[Sample], limits: Slos | None = None) -> dict[str, Any]:
    """Compute every metric of one run. Times are in seconds.

    Failed requests count in the window, in `errors` and, as misses, in `slo_attainment`. Abandoned requests count only
    in the window.
    """
    ok = [sample for sample in samples if sample.is_ok]
    start_ns = min((sample.intended_ns for sample in samples), default=0)
    seconds = max(1, max((sample.end_ns for sample in samples), default=0) - start_ns) / 1e9
    completion = sum(sample.num_tokens for sample in ok)
    prompt = sum(sample.prompt_tokens for sample in ok)
    judged = [sample for sample in samples if not sample.is_abandoned]
    good = {name: sum(is_good(sample, {name: limit}) for sample in judged) for name, limit in (limits or {}).items()}
    all_good = sum(is_good(sample, limits or {}) for sample in judged)
    streamed = [sample for sample in ok if sample.is_stream and sample.event_ns]
    num_events = sum(len(sample.event_ns) for sample in streamed)
    num_reads = sum(len(set(stream)) for sample in streamed for stream in sample.streams)
    return {
        "num_requests": len(samples),
        "num_ok": len(ok),
        "num_abandoned": sum(sample.is_abandoned for sample in samples),
        "errors": dict(Counter(s.failure for s in samples if s.error is not None)),
        "error_messages": {
            s.failure: s.error_message for s in reversed(samples) if s.error_message
        },  # keeps the first message of each kind
        "window_seconds": seconds,
        "prompt_tokens": prompt,
        "cached_tokens": sum(sample.cached_tokens for sample in ok),
        "completion_tokens": completion,
        "token_counts_from": "usage" if all(s.completion_tokens is not None for s in ok) else "events",
        "num_wrong_length": sum(s.must_fill and s.num_tokens != s.requested_tokens * s.num_choices for s in ok),
        "requests_per_second": len(ok) / seconds,
        "completion_tokens_per_second": completion / seconds,
        "total_tokens_per_second": (completion + prompt) / seconds,
        "goodput_per_second": all_good / seconds,
        "sessions_per_hour": _num_whole_sessions(samples) / seconds * 3600,
        "slo_attainment": {name: count / max(1, len(judged)) for name, count in good.items()}
        | {"all": all_good / max(1, len(judged))},
        "num_judged": len(judged),
        "num_good": all_good,
        "tokens_per_event": sum(sample.num_tokens for sample in streamed) / num_events if num_events else None,
        "events_per_read": num_events / num_reads if num_events else None,
        "distributions": {name: distribution(values) for name, values in series(samples).items()},
        "phases": {name: distribution(values) for name, values in phase_series(ok).items()},
    }


def series(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the values of each metric in seconds, unordered. Failed requests count in send_lag and submit only."""
    ok = [sample for sample in samples if sample.is_ok]
    sent = [sample for sample in samples if sample.sent_ns]
    nanoseconds: dict[str, Iterable[float]] = {
        "send_lag": (sample.send_lag_ns for sample in sent),
        "submit": (sample.submit_ns for sample in sent if sample.submit_ns is not None),
        "ttft": (sample.ttft_ns for sample in ok),
        "ttft_from_send": (sample.ttft_ns - sample.send_lag_ns for sample in ok),
        "tpot": (sample.tpot_ns for sample in ok if sample.tpot_ns is not None),
        "itl": (gap_ns for sample in ok for gap_ns in _gaps_ns(sample)),
        "latency": (sample.latency_ns for sample in ok),
        "latency_from_send": (sample.latency_ns - sample.send_lag_ns for sample in ok),
    }
    return {name: [value / 1e9 for value in values] for name, values in nanoseconds.items()}


def steady_state(samples: Sequence[Sample]) -> dict[str, Any] | None:
    """Measure the time from the end of the first answer to the last send, when the load neither grows nor runs out: its
    throughput, and the latencies of the requests that were sent in that time, up to the first that had not ended when
    the time was over. Times are in seconds. Returns None if fewer than ten answers ended in that time.

    Whether a request is included depends on when it was sent, not on how long it took, so that slow ones count too.
    """
    ok = [sample for sample in samples if sample.is_ok]
    start_ns = min((sample.end_ns for sample in ok), default=0)
    end_ns = max((sample.sent_ns for sample in samples), default=0)
    num_ended = sum(start_ns < sample.end_ns <= end_ns for sample in ok)
    if num_ended < LEAST_STEADY:
        return None
    cut_ns = min((sample.intended_ns for sample in samples if sample.end_ns > end_ns), default=end_ns)
    tokens = sum(
        sum(start_ns < event_ns <= end_ns for event_ns in s.event_ns) * s.num_tokens / len(s.event_ns)
        for s in ok
        if s.event_ns
    )
    within = [sample for sample in samples if start_ns <= sample.intended_ns < cut_ns]
    first_ns = min(sample.intended_ns for sample in samples)
    seconds = (end_ns - start_ns) / 1e9
    return {
        "from_seconds": (start_ns - first_ns) / 1e9,
        "to_seconds": (end_ns - first_ns) / 1e9,
        "requests_per_second": num_ended / seconds,
        "completion_tokens_per_second": tokens / seconds,
        "num_requests": len(within),
        "distributions": {name: distribution(values) for name, values in series(within).items()},
    }


def phase_series(samples: Iterable[Sample]) -> dict[str, list[float]]:
    """Return the durations (seconds) of each phase that the server reported, in the server's order."""
    phases: dict[str, list[float]] = {}
    for sample in samples:
        for name, duration_ns in sample.phases_ns.items():
            phases.setdefault(name, []).append(duration_ns / 1e9)
    return phases


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return the count, mean, percentiles and maximum of the values, or None if there are none."""
    if not values:
        return None
    ordered = sorted(values)
    quantiles = {f"p{q}": percentile(ordered, q) for q in QUANTILES}
    return {"n": len(ordered), "mean": statistics.fmean(ordered), **quantiles, "max": ordered[-1]}


def _num_whole_sessions(samples: Sequence[Sample]) -> int:
    """Return the number of conversations without a failed turn; 0 if no request is a later turn of one."""
    failed = {sample.index for sample in samples if not sample.is_ok}
    return len({sample.index for sample in samples} - failed) if any(sample.turn for sample in samples) else 0


def _gaps_ns(sample: Sample) -> list[int]:
    return [later - earlier for stream in sample.streams for earlier, later in itertools.pairwise(stream)]


def is_good(sample: Sample, limits: Slos) -> bool:
    """Return whether a request was answered within the limits."""
    if not sample.is_ok:
        return False
    return slos.kept(
        limits,
        ttft=sample.ttft_ns / 1e9,
        latency=sample.latency_ns / 1e9,
        tpot=None if sample.tpot_ns is None else sample.tpot_ns / 1e9,
        gaps=[gap_ns / 1e9 for gap_ns in _gaps_ns(sample)] if "itl" in limits else (),
    )


def oversaturation(samples: Sequence[Sample]) -> str | None:
    """Return the reason why a steady rate was more than the server could take, or None if it was not, or if there were
    fewer than 20 requests.

    From the second to the third to the fourth quarter of the sending time, both the mean number of requests in flight
    and the median latency must have grown. One of them alone may be chance, or may only show that the run has begun.
    """
    sent = [sample for sample in samples if sample.sent_ns and sample.turn == 0]
    if len(sent) < 20:
        return None
    start = min(s.intended_ns for s in sent)
    end = max(s.intended_ns for s in sent)
    quarter = max(1.0, (end - start) / 4)
    in_flight = []
    latencies = []
    for i in (1, 2, 3):
        low = start + i * quarter
        high = start + (i + 1) * quarter
        in_flight.append(sum(max(0.0, min(s.end_ns, high) - max(s.intended_ns, low)) for s in sent) / quarter)
        mine = [s.end_ns - s.intended_ns for s in sent if low <= s.intended_ns <= high]
        latencies.append(statistics.median(mine) if mine else 0.0)
    grew = in_flight[0] < in_flight[1] < in_flight[2] and in_flight[2] > 1.3 * in_flight[0] + 2
    slowed = latencies[0] < latencies[1] < latencies[2] and latencies[2] > 1.3 * latencies[0]
    if grew and slowed:
        return (
            f"while the rate was steady, requests in flight grew from {in_flight[0]:.1f} to {in_flight[2]:.1f}, and "
            f"their latency from {latencies[0] / 1e9:.2f} to {latencies[2] / 1e9:.2f} s"
        )
    return None
