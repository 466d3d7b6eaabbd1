"""The last records, kept in memory for people who ask about a request that just ended. Knows no HTTP."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

from oaiserve.times import RequestRecord

Entry = dict[str, Any]
Entries = list[Entry]


class RecentRequests:
    """A ring of `size` records. Written by the telemetry thread, read by any."""

    def __init__(self, size: int, epoch_offset_ns: int) -> None:
        self._epoch_offset_ns = epoch_offset_ns  # wall clock minus monotonic clock
        self._records: deque[RequestRecord] = deque(maxlen=size)
        self._lock = Lock()

    def add(self, record: RequestRecord) -> None:
        with self._lock:
            self._records.append(record)

    def get(self, request_id: str) -> Entry | None:
        for record in self._snapshot():
            if record.request_id == request_id:
                return self._entry(record)
        return None

    def list(self) -> Entries:
        """Newest first."""
        return [self._entry(record) for record in self._snapshot()]

    def _snapshot(self) -> tuple[RequestRecord, ...]:
        with self._lock:
            return tuple(reversed(self._records))

    def _entry(self, record: RequestRecord) -> Entry:
        phases = record.times.phases()
        received_ns = phases[0].start_ns
        return {
            "request_id": record.request_id,
            "trace_id": record.trace.trace_id_hex,
            "operation": record.operation,
            "model": record.model,
            "stream": record.stream,
            "outcome": str(record.outcome),
            "status": record.http_status,
            "error_type": record.error_type,
            "finish_reasons": list(record.finish_reasons),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "num_preemptions": record.num_preemptions,
            "stalled_ns": record.stalled_ns,
            "params": dict(record.params),
            "received_unix_ns": received_ns + self._epoch_offset_ns,
            "duration_ns": record.times.duration_ns,
            "duration_ms": record.times.duration_ns / 1e6,
            "time_to_first_token_ns": record.times.time_to_first_token_ns,
            "phases": [
                {
                    "name": phase.name,
                    "start_ns": phase.start_ns - received_ns,  # since the request was received
                    "duration_ns": phase.duration_ns,
                    "duration_ms": phase.duration_ns / 1e6,
                }
                for phase in phases
            ],
        }
