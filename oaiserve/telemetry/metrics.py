"""`Metrics` holds everything on /metrics: series of requests and steps, the engine's numbers, and its own cost.

One lock guards the series. The telemetry thread takes it once per record. A page is rendered under the lock, so that
all its numbers are from the same moment. Neither the event loop nor the engine thread ever takes the lock: the amounts
that they add wait in a queue.
"""

from __future__ import annotations

import logging
import platform
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from threading import Lock

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector

from oaiserve.facts.engine_numbers import EngineNumbers
from oaiserve.facts.metric import Metric
from oaiserve.facts.record import RequestRecord
from oaiserve.facts.step_record import StepRecord
from oaiserve.facts.times import EpochOffset
from oaiserve.runtime import THREADS, Runtime
from oaiserve.system_memory import limit_bytes
from oaiserve.telemetry import names, vllm_names
from oaiserve.telemetry.page import Form, Page, negotiate
from oaiserve.telemetry.recent import OpenRequests, no_open_requests
from oaiserve.telemetry.request_series import RequestSeries
from oaiserve.telemetry.samples import LiveSamples
from oaiserve.telemetry.series import (
    NS_PER_SECOND,
    CallbackFamily,
    Counter,
    CounterFamily,
    Distribution,
    Family,
    HistogramFamily,
    LabelValues,
    Number,
)
from oaiserve.telemetry.targets import Targets

logger = logging.getLogger(__name__)

Numbers = Mapping[LabelValues, Number]


@dataclass(frozen=True)
class Measured:
    """What telemetry needs from the server: its names, its engine, and the numbers that other components maintain."""

    model: str  # the served name
    version: str
    snapshot: Callable[[], EngineNumbers]
    take_steps: Callable[[], list[StepRecord]] = list  # the engine's steps since the last call
    model_info: Mapping[str, str] = field(default_factory=dict)  # values for the labels of oaiserve_model_info
    # Numbers that other components maintain, read for each page.
    elsewhere: Mapping[Metric, Callable[[], Numbers]] = field(default_factory=dict)
    # Returns the newest open requests by id, newest first, or only the one with a given id. The other argument is the
    # wall clock minus the monotonic clock.
    open_requests: OpenRequests = no_open_requests
    read_meters: Callable[[], None] = lambda: None  # called once a second, on the telemetry thread
    targets: Targets = field(default_factory=Targets)  # objectives by which requests are judged
    series: type[RequestSeries] = RequestSeries
    shows: Callable[[Metric], bool] = lambda metric: True  # whether the page contains a metric


class Metrics:
    """All metrics of the server. Only the telemetry thread calls `observe` and `update`; any may call the rest."""

    def __init__(self, measured: Measured, *, epoch_offset_ns: EpochOffset, runtime: Runtime = THREADS) -> None:
        self._snapshot = measured.snapshot
        self._take_steps = measured.take_steps
        self._clock_ns = runtime.clock_ns
        self._now = EngineNumbers()  # numbers of the page that is being rendered
        self._series = measured.series(measured.model, epoch_offset_ns, measured.targets)
        self.samples = LiveSamples(self._series, epoch_offset_ns, runtime.clock_ns)
        self._constants = {
            "model_name": measured.model,
            "engine": vllm_names.ENGINE_INDEX,
            "gen_ai_provider_name": names.SERVICE_NAME,
        }
        build = {"version": measured.version, "python": platform.python_version(), "model": measured.model}
        cache_config = measured.model, vllm_names.ENGINE_INDEX, measured.model_info.get("block_size", "")
        memory_limit = limit_bytes()
        self._elsewhere: dict[Metric, Callable[[], Numbers]] = {
            names.MEMORY_LIMIT: lambda: {(): memory_limit},
            names.BUILD_INFO: _info(names.BUILD_INFO, build),
            names.MODEL_INFO: _info(names.MODEL_INFO, {**measured.model_info, "model": measured.model}),
            names.ADAPTER_REQUESTS: lambda: _adapter_requests(self._now),
            names.KV_BLOCKS: lambda: _blocks(self._now),
            names.DRAFT_TOKENS: lambda: _draft_tokens(self._now),
            names.ENGINE_HOST_SECONDS: lambda: {
                (part,): spent_ns / NS_PER_SECOND for part, spent_ns in self._now.host_ns.items()
            },
            vllm_names.WAITING_BY_REASON: lambda: _waiting(measured.model, self._now),
            vllm_names.ACCEPTED_BY_POSITION: lambda: _accepted_by_position(measured.model, self._now),
            vllm_names.LORA_REQUESTS: lambda: _lora_requests(measured.model, self._now, runtime.unix_ns()),
            vllm_names.CACHE_CONFIG: lambda: {(*cache_config, str(self._now.blocks_total)): 1},
            **measured.elsewhere,
        }
        every = (*names.METRICS, *names.GEN_AI_METRICS, *vllm_names.METRICS)
        families = [self._family(metric) for metric in every if measured.shows(metric)]
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._page = Page(families, registry, runtime.clock_ns)
        self._lock = Lock()
        self._num_pages = 0  # pages whose rendering has begun
        # The latest page in each format, with or without the names of clients, and the number of that page.
        self._pages: dict[tuple[Form, bool], tuple[int, bytes]] = {}
        # Amounts to add to a series, from threads that must not wait for the lock, such as the event loop.
        self._pending: deque[tuple[Counter | Distribution, LabelValues, int]] = deque()

    def _family(self, metric: Metric) -> Family:
        """Return the family of a metric. Its numbers come from another component, from the engine, or from a series."""
        if metric in self._elsewhere:
            return CallbackFamily(metric, self._elsewhere[metric])
        if isinstance(metric.of, str):
            name = metric.of
            labels = tuple(self._constants[label] for label in metric.labels)
            if name.endswith("_ns"):
                return CallbackFamily(metric, lambda: {labels: getattr(self._now, name) / NS_PER_SECOND})
            return CallbackFamily(metric, lambda: {labels: getattr(self._now, name)})
        series = metric.of or metric
        metric = self._series.shown(metric, series)
        if series in self._series.counters:
            return CounterFamily(metric, self._series.counters[series], self._constants)
        if series in self._series.distributions:
            return HistogramFamily(metric, self._series.distributions[series], self._constants)
        return CallbackFamily(metric, dict)

    def observe(self, record: RequestRecord) -> None:
        """Add an ended request to the series, after the engine's steps so far, which include the steps of the
        request."""
        with self._lock:
            self._apply_pending()
            self._series.observe(record)

    def update(self) -> None:
        """Add the engine's new steps and the pending amounts to the series, and make a sample once a second."""
        with self._lock:
            self._apply_pending()
            self.samples.add(self._snapshot)

    def observe_event_loop_lag(self, seconds: float) -> None:
        lag = self._series.distributions[names.EVENT_LOOP_LAG_SECONDS]
        self._pending.append((lag, (), round(seconds * NS_PER_SECOND)))

    def count(self, metric: Metric, label: str, number: int = 1) -> None:
        self._pending.append((self._series.counters[metric], (label,), number))

    def show(self, metric: Metric, read: Callable[[], Numbers]) -> None:
        """Add a metric to the page. `read` is called for each page, in a worker thread, and returns its numbers. If it
        raises, the page omits them, and the first such error is logged."""
        has_failed = False

        def numbers() -> Numbers:
            nonlocal has_failed
            try:
                return read()
            except BaseException:  # A plug-in may also raise SystemExit.
                if not has_failed:
                    logger.exception("The metric %s has no numbers, because reading them failed", metric.name)
                has_failed = True
                return {}

        with self._lock:
            self._page.add(CallbackFamily(metric, numbers))

    def show_histogram(self, metric: Metric) -> Callable[[float], None]:
        """Add a histogram without labels to the page, and return the function that adds a value. Any thread may call
        it."""
        series = Distribution(shown_as=(metric,), per_unit=NS_PER_SECOND)
        with self._lock:
            self._page.add(HistogramFamily(metric, series, self._constants))
        return lambda value: self._pending.append((series, (), round(value * NS_PER_SECOND)))

    def render(self, accept: str | None, names_clients: bool = True) -> tuple[bytes, str]:
        """Return the page for /metrics, which includes all observations before the call, and its content type. Without
        `names_clients`, it has sums over the clients instead.

        Callers that arrive while a page is being rendered share the next one. Call this in a worker thread, because it
        may take milliseconds.
        """
        form = negotiate(accept)
        num_before = self._num_pages
        with self._lock:
            number, page = self._pages.get((form, names_clients), (0, b""))
            if number <= num_before:  # the rendering of the stored page began before this call
                started_ns = self._clock_ns()
                self._num_pages += 1
                self._read()
                page = self._page.render(form, names_clients=names_clients)
                self._pages[form, names_clients] = (self._num_pages, page)
                self._series.add(names.SCRAPE_DURATION_SECONDS, (), self._clock_ns() - started_ns)
        return page, str(form)

    def _read(self) -> None:
        self._apply_pending()
        self._now = self._snapshot()

    def _apply_pending(self) -> None:
        for step in self._take_steps():
            self._series.observe_step(step)
        while self._pending:
            series, labels, amount = self._pending.popleft()
            series.add(labels, amount)


def _info(metric: Metric, values: Mapping[str, str]) -> Callable[[], Numbers]:
    """Return a function that returns one sample, whose labels carry the information. A label without a value is
    empty."""
    labels = tuple(values.get(label, "") for label in metric.labels)
    return lambda: {labels: 1}


def _adapter_requests(now: EngineNumbers) -> Numbers:
    return {
        (adapter, state): number
        for adapter, numbers in now.adapters.items()
        for state, number in zip(("running", "waiting"), numbers, strict=True)
    }


def _draft_tokens(now: EngineNumbers) -> Numbers:
    accepted = now.num_accepted_tokens
    return {("accepted",): accepted, ("rejected",): now.num_draft_tokens - accepted}


def _waiting(model: str, now: EngineNumbers) -> Numbers:
    reasons = {"capacity": now.num_waiting - now.num_deferred, "deferred": now.num_deferred}
    return {(model, vllm_names.ENGINE_INDEX, reason): number for reason, number in reasons.items()}


def _accepted_by_position(model: str, now: EngineNumbers) -> Numbers:
    """Return how many draft tokens were accepted at each position."""
    numbers = list(accumulate(reversed(now.drafts_by_accepted[1:])))
    return {
        (model, vllm_names.ENGINE_INDEX, str(position)): number for position, number in enumerate(reversed(numbers))
    }


def _blocks(now: EngineNumbers) -> Numbers:
    used = now.blocks_used
    cached = now.blocks_reusable
    return {("used",): used, ("cached",): cached, ("free",): now.blocks_total - used - cached}


def _lora_requests(model: str, now: EngineNumbers, unix_ns: int) -> Numbers:
    """Return one sample, whose labels list the running and the waiting adapters; no sample if no adapter is loaded."""
    if not now.adapters:
        return {}
    running, waiting = (
        ",".join(sorted(name for name, numbers in now.adapters.items() if numbers[state])) for state in (0, 1)
    )
    return {(model, vllm_names.ENGINE_INDEX, str(vllm_names.MOST_ADAPTERS), running, waiting): unix_ns / 1e9}
