"""Read the server's gauges during a run: requests running, requests waiting, and the share of the KV cache in use.

A thread of the main process reads them, because that process sends no requests. The report says what the reading cost.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from loadtest.metrics_page import values_of
from oaiserve.runtime import ENDED, THREADS, Runtime, When

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The names of the gauges in the server's /metrics. A server with several engines has one series per engine."""

    running: str
    waiting: str
    kv_cache_usage: str  # 0 to 1

    def read(self, text: str) -> dict[str, float | None]:
        """Return sums over the engines, and the mean KV cache usage; None for a gauge that is not on the page."""
        running, waiting, usage = (values_of(text, name) for name in (self.running, self.waiting, self.kv_cache_usage))
        return {
            "running": sum(running) if running else None,
            "waiting": sum(waiting) if waiting else None,
            "kv_cache_usage": statistics.fmean(usage) if usage else None,
        }


class GaugeWatch:
    """A context in which a thread reads the gauges once per period. `client` has the server's base URL."""

    def __init__(self, client: httpx.Client, gauges: Gauges, period_seconds: float, runtime: Runtime = THREADS) -> None:
        self._client = client
        self._gauges = gauges
        self._period_seconds = period_seconds
        self._rows: list[tuple[int, dict[str, float | None]]] = []
        self._reads_ns: list[int] = []
        self._num_failed = 0
        self._cpu_ns = 0
        self._due_ns = 0
        self._has_ended = False
        self._clock_ns = runtime.clock_ns
        self._thread_cpu_ns = runtime.thread_cpu_ns
        self._worker = runtime.worker("gauges", self._turn, self._plan)

    def report(self, start_ns: int) -> dict[str, Any]:
        """Return the values that were read since `start_ns`, and what reading cost. Call it after the context ended."""
        return {
            "period_seconds": self._period_seconds,
            "num_reads": len(self._reads_ns),
            "num_failed": self._num_failed,
            "mean_seconds": statistics.fmean(self._reads_ns) / 1e9 if self._reads_ns else None,
            "max_seconds": max(self._reads_ns) / 1e9 if self._reads_ns else None,
            "cpu_seconds": self._cpu_ns / 1e9,
            "series": [{"at": (at_ns - start_ns) / 1e9} | row for at_ns, row in self._rows if at_ns >= start_ns],
        }

    def _plan(self) -> None:
        self._due_ns = self._clock_ns() + int(self._period_seconds * 1e9)

    def _turn(self) -> When:
        self._worker.clear()
        if self._has_ended:
            self._cpu_ns = self._thread_cpu_ns()
            return ENDED
        if self._clock_ns() >= self._due_ns:
            self._read()
            self._plan()
        return self._due_ns

    def _read(self) -> None:
        asked_ns = self._clock_ns()
        try:
            text = self._client.get("/metrics", timeout=TIMEOUT_SECONDS).text
        except httpx.HTTPError:
            self._num_failed += 1
            return
        now_ns = self._clock_ns()
        self._reads_ns.append(now_ns - asked_ns)
        self._rows.append((now_ns, self._gauges.read(text)))

    def __enter__(self) -> GaugeWatch:
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_ended = True
        self._worker.post(None)
        self._worker.join()
