"""Telemetry turns the records of ended requests and the engine's snapshot into metrics, spans, log lines and accounts.

`app` builds one `Telemetry` and passes `record`, `render`, `recent`, `clients` and `samples` to the routes. This
package knows neither HTTP nor the engine.

Four terms describe how numbers are exported. A *metric* is declared with its type, help text and labels (names.py,
vllm_names.py). A *series* holds its counts (series.py, request_series.py). The *page* of /metrics shows all metrics,
including numbers that other components maintain (metrics.py, page.py). A *sample* holds the changes within a second,
for the live page (samples.py). JSON, log lines and spans show the facts of a record (record_facts.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oaiserve.errors import StartupError
from oaiserve.facts.record import RequestRecord
from oaiserve.facts.times import EpochOffset, WallClock
from oaiserve.facts.trace import TraceContext
from oaiserve.runtime import THREADS, Runtime
from oaiserve.telemetry import logs, names
from oaiserve.telemetry.clients import Clients
from oaiserve.telemetry.log_limit import LogLimit
from oaiserve.telemetry.metrics import Measured, Metrics
from oaiserve.telemetry.otel import exporter_kind, resource, trim
from oaiserve.telemetry.recent import RecentRequests
from oaiserve.telemetry.recorder import Consumer, Recorder
from oaiserve.telemetry.recording import Recording

if TYPE_CHECKING:
    from oaiserve.telemetry.tracing import Tracing

__all__ = ["Measured", "Telemetry", "check_tracing", "make_tracing"]


def make_tracing(
    environ: Mapping[str, str] = os.environ, *, version: str, service: str = names.SERVICE_NAME, **settings: Any
) -> Tracing | None:
    """Return `Tracing` with the exporter that the environment selects, or None if it selects none.

    Raises StartupError for an unsupported exporter, and for values that the SDK rejects.
    """
    trim(os.environ)
    if (kind := exporter_kind(environ)) is None:
        return None
    try:
        # Imported late, because OpenTelemetry's SDK would add a tenth of a second to each start. The import also reads
        # variables.
        from oaiserve.telemetry import tracing

        return tracing.Tracing(tracing.exporter(kind), resource=resource(version, service), version=version, **settings)
    except (ValueError, RuntimeError) as error:  # RuntimeError: the named credential provider does not exist
        raise StartupError(f"An OTEL_ variable has a value that OpenTelemetry rejects: {error}") from error


def check_tracing() -> None:
    """Check the environment as `make_tracing` does, for a server whose model takes long to load. Raises
    StartupError."""
    epoch_offset_ns = WallClock(THREADS.unix_ns, THREADS.clock_ns)
    tracing = make_tracing(
        epoch_offset_ns=epoch_offset_ns, version="", count_spans=lambda result, number: None, runtime=THREADS
    )
    if tracing is not None:
        tracing.close(timeout_seconds=1)  # There are no spans to export.


class Telemetry:
    """Metrics, spans, log lines and the ring of recent requests, all fed by one thread.

    `log_limit` is the log's limit, whose summaries are written from here, and whose counts are on /metrics. `recording`
    is called with the offset of the wall clock, and returns a recording of the requests. `observers` are functions of
    plug-ins, by the plug-in's name, that get each record. `environ` is for tests: the OpenTelemetry SDK reads most of
    its variables from the process itself. Raises StartupError for an invalid or unsupported OTEL_* variable.
    """

    def __init__(
        self,
        measured: Measured,
        *,
        recent_requests: int,
        log_limit: LogLimit | None = None,
        recording: Callable[[EpochOffset], Recording] | None = None,
        observers: Mapping[str, Consumer] | None = None,
        environ: Mapping[str, str] = os.environ,
        runtime: Runtime,
    ) -> None:
        self._clock_ns = runtime.clock_ns
        epoch_offset_ns = WallClock(runtime.unix_ns, runtime.clock_ns)
        self._read_meters = measured.read_meters
        self.recent = RecentRequests(recent_requests, epoch_offset_ns, measured.open_requests, measured.targets)
        self.clients = Clients(runtime.clock_ns)
        elsewhere = dict(measured.elsewhere)
        if log_limit is not None:
            elsewhere[names.LOG_MESSAGES] = log_limit.counts
        measured = replace(measured, elsewhere=elsewhere)
        self._metrics = Metrics(measured, epoch_offset_ns=epoch_offset_ns, runtime=runtime)
        self._log_limit = log_limit
        self.samples = self._metrics.samples
        self.render = self._metrics.render
        self.show = self._metrics.show
        self.show_histogram = self._metrics.show_histogram
        self.observe_event_loop_lag = self._metrics.observe_event_loop_lag
        self.count_refused_access = partial(self._metrics.count, names.REFUSED_ACCESS)
        consumers: dict[str, Consumer] = {
            "recent": self.recent.add,
            "clients": self.clients.add,
            "metrics": self._metrics.observe,
            "log": logs.log_request,
        }
        if recording is None:
            self._recording = None
        else:
            self._recording = recording(epoch_offset_ns)
        if self._recording is not None:
            consumers["recording"] = self._recording.add
        self._tracing = make_tracing(
            environ,
            epoch_offset_ns=epoch_offset_ns,
            version=measured.version,
            count_spans=partial(self._metrics.count, names.SPANS),
            runtime=runtime,
        )
        if self._tracing is not None:
            consumers["tracing"] = self._tracing.record
            for result in ("ended", "exported", "failed", "dropped"):
                self._metrics.count(names.SPANS, result, 0)  # PromQL's `rate` then sees the first increment
        for name, observe in (observers or {}).items():
            consumers[f"plugin {name}"] = observe
        count_error = partial(self._metrics.count, names.TELEMETRY_ERRORS)
        self._recorder = Recorder(consumers, count_error, self._tick, runtime=runtime)

    def record(self, record: RequestRecord) -> None:
        """Queue the record of an ended request. The event loop calls this, so it never blocks and never raises."""
        if self._recording is None:
            record.account.prompts = []  # drops the token ids early, because many records may be waiting
        self._recorder.record(record)

    def wait_for_queued(self, timeout_seconds: float) -> None:
        """Wait until all records that are in the queue now have reached `recent` and the metrics, or until the
        timeout."""
        self._recorder.wait_for_queued(timeout_seconds)

    @property
    def has_tracing(self) -> bool:
        return self._tracing is not None

    def is_sampled(self, trace: TraceContext) -> bool:
        return self._tracing is not None and self._tracing.is_sampled(trace)

    def _tick(self) -> None:
        self._read_meters()
        self._metrics.update()
        if self._log_limit is not None:
            self._log_limit.tell()

    def close(self, timeout_seconds: float) -> bool:
        """Process the queued records and make the last exports within the timeout. Return False if some data may be
        lost."""
        deadline_ns = self._clock_ns() + int(timeout_seconds * 1e9)

        def remaining_seconds() -> float:
            return max(0.0, (deadline_ns - self._clock_ns()) / 1e9)

        drained = self._recorder.close(timeout_seconds)
        if drained and self._recording is not None:
            self._recording.close()
        spans_exported = self._tracing is None or self._tracing.close(remaining_seconds())
        if self._log_limit is not None:
            self._log_limit.tell(at_once=True)
        return drained and spans_exported
