"""Prometheus: histograms and counters fed from records, gauges read from the engine's snapshot, and `render`.

Everything hangs on the registry passed in. Names, help texts and buckets come from `names`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from functools import cache
from threading import Lock
from time import perf_counter
from typing import Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    Info,
    ProcessCollector,
    Summary,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oaiserve.telemetry import names
from oaiserve.times import RequestRecord


class Snapshot(Protocol):
    """The engine's numbers at one moment."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_tokenizing(self) -> int: ...
    @property
    def blocks_used(self) -> int: ...
    @property
    def blocks_total(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def num_steps(self) -> int: ...


class SnapshotCollector(Collector):
    """Turns the snapshot of the moment into metrics when a scrape comes, so that the engine never pushes a number."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterable[Metric]:
        """The names alone: registering must not need an engine that runs."""
        return [
            _gauge(names.REQUESTS_RUNNING),
            _gauge(names.REQUESTS_WAITING),
            _gauge(names.TOKENIZE_QUEUE_DEPTH),
            _gauge(names.KV_CACHE_USAGE),
            _gauge(names.KV_BLOCKS),
            _counter(names.PREEMPTIONS),
            _counter(names.ENGINE_STEPS),
        ]

    def collect(self) -> Iterable[Metric]:
        now = self._snapshot()
        blocks = _gauge(names.KV_BLOCKS)
        blocks.add_metric(["used"], now.blocks_used)
        blocks.add_metric(["free"], now.blocks_total - now.blocks_used)
        return [
            _gauge(names.REQUESTS_RUNNING, now.num_running),
            _gauge(names.REQUESTS_WAITING, now.num_waiting),
            _gauge(names.TOKENIZE_QUEUE_DEPTH, now.num_tokenizing),
            _gauge(names.KV_CACHE_USAGE, now.blocks_used / max(1, now.blocks_total)),
            blocks,
            _counter(names.PREEMPTIONS, now.num_preemptions),
            _counter(names.ENGINE_STEPS, now.num_steps),
        ]


def _gauge(metric: names.Metric, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(metric.name, metric.help, value, labels=metric.labels or None, unit=metric.unit)


def _counter(metric: names.Metric, value: float | None = None) -> CounterMetricFamily:
    return CounterMetricFamily(metric.name, metric.help, value)


class Metrics:
    """`observe` is called by the telemetry thread; `render` and the `count_`/`observe_` methods by any thread."""

    def __init__(
        self, registry: CollectorRegistry, snapshot: Callable[[], Snapshot], *, model: str, version: str
    ) -> None:
        # They would be one more series for each child. The client library has this as a switch of the process only.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry
        self._render_lock = Lock()

        self._phase = self._histogram(names.PHASE_SECONDS)
        self._duration = self._histogram(names.DURATION_SECONDS)
        self._time_to_first_token = self._histogram(names.TIME_TO_FIRST_TOKEN_SECONDS)
        self._time_per_output_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN_SECONDS)
        self._preemption_stall = self._histogram(names.PREEMPTION_STALL_SECONDS)
        self._requests = self._counter(names.REQUESTS)
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self._cached_tokens = self._counter(names.CACHED_PROMPT_TOKENS)
        self._generation_tokens = self._counter(names.GENERATION_TOKENS)
        self._errors = self._counter(names.TELEMETRY_ERRORS)
        self._spans = self._counter(names.SPANS)
        lag = names.EVENT_LOOP_LAG_SECONDS
        self._event_loop_lag = Histogram(lag.name, lag.help, unit=lag.unit, buckets=lag.buckets, registry=registry)
        scrape = names.SCRAPE_DURATION_SECONDS
        self._scrape_duration = Summary(scrape.name, scrape.help, unit=scrape.unit, registry=registry)
        build = Info(names.BUILD_INFO.name.removesuffix("_info"), names.BUILD_INFO.help, registry=registry)
        build.info({"version": version, "python": platform.python_version(), "model": model})

        registry.register(SnapshotCollector(snapshot))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def observe(self, record: RequestRecord) -> None:
        """Adds one ended request. Sums move by exactly the record's nanoseconds, as float seconds."""
        labels = (record.outcome, record.operation, record.model)
        exemplar = {"trace_id": record.trace.trace_id_hex}
        for phase in record.times.phases():
            self._phase(phase.name, *labels).observe(phase.duration_ns / 1e9, exemplar)
        self._duration(*labels).observe(record.times.duration_ns / 1e9, exemplar)
        ttft_ns = record.times.time_to_first_token_ns
        if ttft_ns is not None:
            self._time_to_first_token(*labels).observe(ttft_ns / 1e9, exemplar)
        # The choices of a request run side by side, so the time per token is that of one choice.
        tokens_per_choice = record.completion_tokens // max(1, len(record.finish_reasons))
        tpot_ns = record.times.time_per_output_token_ns(tokens_per_choice)
        if tpot_ns is not None and tokens_per_choice > 1:
            self._time_per_output_token(*labels).observe(tpot_ns / 1e9, exemplar)
        if record.num_preemptions:
            self._preemption_stall(record.operation, record.model).observe(record.stalled_ns / 1e9, exemplar)
        self._prompt_tokens(record.operation, record.model).inc(record.prompt_tokens)
        self._cached_tokens(record.operation, record.model).inc(record.cached_tokens)
        self._generation_tokens(record.operation, record.model).inc(record.completion_tokens)
        status = "" if record.http_status is None else str(record.http_status)
        self._requests(*labels, status, record.error_type or "").inc()

    def observe_event_loop_lag(self, seconds: float) -> None:
        self._event_loop_lag.observe(seconds)

    def count_error(self, consumer: str) -> None:
        """A record that `consumer` failed on."""
        self._errors(consumer).inc()

    def count_spans(self, result: str, number: int) -> None:
        """`result`: "ended", "exported" or "failed"."""
        self._spans(result).inc(number)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The page for /metrics and its content type: OpenMetrics (with exemplars) for those who ask for it in their
        Accept header, else the classic text format. Takes milliseconds: call it in a worker thread."""
        try:
            encode, content_type = choose_encoder(accept or "")
        except TypeError:  # the client library compares versions, and a version that is no number does not compare
            encode, content_type = choose_encoder("")
        # Rendering is pure Python: two at once would only make both, and the event loop, slower.
        with self._render_lock:
            started = perf_counter()
            page = encode(self._registry)
            self._scrape_duration.observe(perf_counter() - started)
        return page, content_type

    # Both return what looks a child up by its label values, each only once: `labels()` takes a lock on every call.

    def _histogram(self, metric: names.Metric) -> Callable[..., Histogram]:
        histogram = Histogram(
            metric.name,
            metric.help,
            metric.labels,
            unit=metric.unit,
            buckets=metric.buckets,
            registry=self._registry,
        )
        return cache(histogram.labels)

    def _counter(self, metric: names.Metric) -> Callable[..., Counter]:
        counter = Counter(metric.name, metric.help, metric.labels, unit=metric.unit, registry=self._registry)
        return cache(counter.labels)
