"""Decide whether the client's figures can be trusted, from what each process observed of itself while it sent."""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic_ns, process_time_ns
from typing import Any

from loadtest.measure import distribution
from loadtest.sample import Sample

LAG_PERIOD_SECONDS = 0.01
VERDICTS = ("valid", "suspect", "invalid")  # from the best to the worst
SHARED_ALLOWANCE = 4.0  # factor on the limits of delays if client and server share cores
USUAL_ON_SHARED_CORES = "this is usual if client and server share cores"
LATE_SENDS = 0  # indices of the rules about delays
LOOP_LAG = 2


@dataclass(slots=True)
class ProcessHealth:
    """One process's observations of itself: CPU time, event loop lag, garbage collection, memory."""

    wall_ns: int = 0
    cpu_ns: int = 0
    loop_lag_ns: list[int] = field(default_factory=list)  # how late the event loop woke a task, every 10 ms
    gc_ns: int = 0
    longest_gc_ns: int = 0
    peak_memory_bytes: int = 0
    num_connections: int = 0

    def summary(self) -> dict[str, Any]:
        lag = distribution([lag_ns / 1e9 for lag_ns in self.loop_lag_ns])
        return {
            "cpu_share": self.cpu_ns / max(1, self.wall_ns),
            "cpu_seconds": self.cpu_ns / 1e9,
            "loop_lag_seconds": lag,
            "gc_seconds": self.gc_ns / 1e9,
            "longest_gc_seconds": self.longest_gc_ns / 1e9,
            "peak_memory_bytes": self.peak_memory_bytes,
            "num_connections": self.num_connections,
        }


class ProcessWatch:
    """Observes the health of this process between `start` and `stop`. Call both in the event loop that sends, or
    without one, with `watch_loop=False`."""

    def __init__(self) -> None:
        self._health = ProcessHealth()
        self._gc_started_ns = 0
        self._sampler: asyncio.Task[None] | None = None

    def start(self, *, watch_loop: bool = True) -> None:
        gc.collect()
        gc.freeze()  # objects from before the run are not garbage, and scanning them would only cause pauses
        gc.callbacks.append(self._on_gc)
        self._health.wall_ns = -monotonic_ns()
        self._health.cpu_ns = -process_time_ns()
        if watch_loop:
            self._sampler = asyncio.create_task(self._sample_lag())

    def stop(self) -> ProcessHealth:
        self._health.wall_ns += monotonic_ns()
        self._health.cpu_ns += process_time_ns()
        if self._sampler is not None:
            self._sampler.cancel()
        gc.callbacks.remove(self._on_gc)
        gc.unfreeze()
        unit = 1 if sys.platform == "darwin" else 1024
        self._health.peak_memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return self._health

    async def _sample_lag(self) -> None:
        while True:
            due_ns = monotonic_ns() + int(LAG_PERIOD_SECONDS * 1e9)
            await asyncio.sleep(LAG_PERIOD_SECONDS)
            self._health.loop_lag_ns.append(max(0, monotonic_ns() - due_ns))

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started_ns = monotonic_ns()
        else:
            pause_ns = monotonic_ns() - self._gc_started_ns
            self._health.gc_ns += pause_ns
            self._health.longest_gc_ns = max(self._health.longest_gc_ns, pause_ns)


def client_facts(
    samples: Sequence[Sample], offsets: Sequence[float] | None, ceiling: dict[str, float] | None
) -> dict[str, Any]:
    """Compute what the samples show about the client: late sends, the rate it reached, and its load relative to its
    ceiling. `offsets` is the schedule in seconds, or None for a closed loop."""
    sent = [sample for sample in samples if sample.sent_ns]
    late = [s for s in sent if s.is_ok and s.send_lag_ns > max(1e6, 0.05 * s.ttft_ns)]
    offered = achieved = None
    starts_ns = [sample.sent_ns for sample in sent if sample.turn == 0]
    if offsets is not None and len(offsets) > 1 and offsets[-1] > offsets[0] and len(starts_ns) > 1:
        offered = (len(offsets) - 1) / (offsets[-1] - offsets[0])
        achieved = (len(starts_ns) - 1) / max(1, max(starts_ns) - min(starts_ns)) * 1e9
    num_events = sum(len(sample.event_ns) for sample in sent)
    busy_ns = max((s.end_ns for s in sent), default=0) - min((s.sent_ns for s in sent), default=0)
    seconds = max(1, busy_ns) / 1e9
    load = None
    if ceiling is not None:
        load = (
            num_events / seconds / ceiling["events_per_second"] + len(sent) / seconds / ceiling["requests_per_second"]
        )
    return {
        "late_share": len(late) / max(1, len(sent)),  # send lag of more than 1 ms and more than 5 % of the TTFT
        "offered_requests_per_second": offered,
        "achieved_requests_per_second": achieved,
        "events_per_second": num_events / seconds,
        "ceiling": ceiling,
        "load_of_ceiling": load,
    }


Rule = tuple[float, float, float, str]  # a value, the limits above which it is suspect or invalid, and the reason


def verdict(
    metrics: dict[str, Any],
    facts: dict[str, Any],
    processes: Sequence[dict[str, Any]],
    *,
    shares_cores: bool = False,
    is_in_process: bool = False,
) -> dict[str, Any]:
    """Judge the client's figures as valid, suspect or invalid, with the reasons.

    `shares_cores` means that the server runs on the same few cores, which delays any client. So larger delays are
    allowed, and some findings that would otherwise worsen the verdict are only notes. `is_in_process` means that there
    is no client: the engine in this process is meant to be busy, and late submits are its own doing.
    """
    allowance = SHARED_ALLOWANCE if shares_cores else 1.0
    rules = [] if is_in_process else _rules_of_a_client(metrics, facts, processes, allowance)
    if facts["offered_requests_per_second"] is not None:
        missing = 1 - facts["achieved_requests_per_second"] / facts["offered_requests_per_second"]
        rules.append((missing, 0.02, 0.1, "requests were sent {:.1%} slower than scheduled"))
    levels = [0]
    reasons: list[str] = []
    notes: list[str] = []
    for number, (value, suspect, invalid, text) in enumerate(rules):
        level = (value > suspect) + (value > invalid)
        levels.append(level)
        is_usual = shares_cores and number in (LATE_SENDS, LOOP_LAG)
        said = text.format(value) + (f"; {USUAL_ON_SHARED_CORES}" if is_usual else "")
        if level:
            reasons.append(said)
        elif is_usual and value > suspect / allowance:
            notes.append(said)
    doubts = [
        (metrics["num_ok"] == 0, 2, "no request succeeded"),
        (metrics["token_counts_from"] != "usage", 1, "the server sends no usage, so events were counted as tokens"),
        (metrics["num_wrong_length"] > 0, 1, f"{metrics['num_wrong_length']} answers have the wrong length"),
        (
            (metrics["events_per_read"] or 1) > 2,
            1,
            "events arrived in bunches, so the times between tokens are not those of the server",
        ),
    ]
    for applies, level, text in doubts:
        if applies:
            levels.append(level)
            reasons.append(text)
    return {"verdict": VERDICTS[max(levels)], "reasons": reasons, "notes": notes}


def _rules_of_a_client(
    metrics: dict[str, Any], facts: dict[str, Any], processes: Sequence[dict[str, Any]], allowance: float
) -> list[Rule]:
    distributions = metrics["distributions"]
    shortest = min((d["p50"] for d in (distributions["ttft"], distributions["tpot"]) if d is not None), default=0.0)
    lag = max((p["loop_lag_seconds"]["p99"] for p in processes if p["loop_lag_seconds"]), default=0.0)
    cpu = max((p["cpu_share"] for p in processes), default=0.0)
    return [
        (
            facts["late_share"],
            0.01 * allowance,
            0.1 * allowance,
            "{:.1%} of the requests were sent late (by over 5 % of their TTFT)",
        ),
        (cpu, 0.7, 0.95, "a client process used {:.0%} of a core; use more --processes"),
        (
            lag if lag > 0.002 else 0.0,
            0.25 * shortest * allowance,
            shortest * allowance,
            "the client's event loop was up to {:.4f} s late (p99), which is a lot compared with the times it measured",
        ),
        (
            facts["load_of_ceiling"] or 0.0,
            0.5,
            0.8,
            "requests and events were {:.0%} of the most that this client can do",
        ),
    ]
