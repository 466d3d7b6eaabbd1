"""What the server tells about itself, from the records of ended requests and the engine's snapshot.

`app` builds one `Telemetry` and hands `record`, `render` and `recent` to those who need them. Knows no HTTP, no engine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from oaiserve.errors import StartupError
from oaiserve.telemetry import logs
from oaiserve.telemetry.metrics import Metrics, Snapshot
from oaiserve.telemetry.recent import RecentRequests
from oaiserve.telemetry.recorder import Consumer, Recorder
from oaiserve.telemetry.tracing import Tracing, exporter_from_environment
from oaiserve.times import RequestRecord, monotonic_ns

__all__ = ["Snapshot", "Telemetry"]


class Telemetry:
    """Metrics, spans, the log line and the ring of recent requests, fed by one thread.

    Raises StartupError if the OTEL_* variables ask for what this server does not have, or make no sense. `environ` is
    for tests: the OpenTelemetry SDK reads most of its variables from the process itself.
    """

    def __init__(
        self,
        *,
        snapshot: Callable[[], Snapshot],
        model: str,
        version: str,
        recent_requests: int,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        # The one anchor of this process: it turns every stamp into epoch time.
        epoch_offset_ns = time.time_ns() - monotonic_ns()
        self.recent = RecentRequests(recent_requests, epoch_offset_ns)
        self._metrics = Metrics(CollectorRegistry(), snapshot, model=model, version=version)
        consumers: dict[str, Consumer] = {
            "recent": self.recent.add,
            "metrics": self._metrics.observe,
            "log": logs.log_request,
        }
        self._tracing: Tracing | None = None
        exporter = exporter_from_environment(environ)
        if exporter is not None:
            try:
                self._tracing = Tracing(
                    exporter, epoch_offset_ns=epoch_offset_ns, version=version, count_spans=self._metrics.count_spans
                )
            except ValueError as error:  # how the SDK says that one of its limits in the environment is no such limit
                raise StartupError(f"An OTEL_ variable has a value that OpenTelemetry rejects: {error}") from error
            consumers["tracing"] = self._tracing.record
        self._recorder = Recorder(consumers, self._metrics.count_error)

    def record(self, record: RequestRecord) -> None:
        """Takes one ended request. Never blocks and never raises; for the event loop."""
        self._recorder.record(record)

    def observe_event_loop_lag(self, seconds: float) -> None:
        self._metrics.observe_event_loop_lag(seconds)

    def render(self, accept: str | None) -> tuple[bytes, str]:
        """The page for /metrics and its content type. Takes milliseconds: call it in a worker thread."""
        return self._metrics.render(accept)

    def flush(self, timeout_seconds: float) -> bool:
        """Waits until every record so far shows in metrics, ring and log. False: not in that time."""
        return self._recorder.flush(timeout_seconds)

    def close(self, timeout_seconds: float) -> bool:
        """Takes in what is queued and exports what is held, in about that time at most. Blocks. False: something may
        be lost."""
        deadline_ns = monotonic_ns() + int(timeout_seconds * 1e9)
        drained = self._recorder.close(timeout_seconds)
        remaining_seconds = max(0.0, (deadline_ns - monotonic_ns()) / 1e9)
        exported = self._tracing is None or self._tracing.close(remaining_seconds)
        return drained and exported
