"""What the process logs: one setup for all loggers (lines for people, or JSON), and one line per ended request.

Uses the standard library's logging alone. Never logs prompt or answer text.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from oaiserve.times import Outcome, RequestRecord

logger = logging.getLogger("oaiserve.request")

# What every LogRecord has; any other attribute came in through `extra`. uvicorn's `color_message` repeats the message.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


class ConsoleFormatter(logging.Formatter):
    """`2026-11-20 08:14:02.123 INFO     oaiserve.app  message`, local time."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-8s %(name)s  %(message)s")


class JSONFormatter(logging.Formatter):
    """One object per line: ts (UTC), level, logger, message, the extra fields, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str = "INFO", form: Literal["console", "json"] = "console", stream: TextIO | None = None) -> None:
    """Sets up logging for the whole process, once, at start. `stream`: standard error if not given.

    Start uvicorn with `log_config=None`, so that it does not set up its own again.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JSONFormatter() if form == "json" else ConsoleFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        uvicorn_logger = logging.getLogger(name)
        uvicorn_logger.handlers.clear()
        uvicorn_logger.propagate = True
    # The line per request below says more than uvicorn's, and comes when the answer has ended.
    logging.getLogger("uvicorn.access").disabled = True
    # It repeats what a client wrote in a malformed tracestate header; ignoring the header is enough.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)


def log_request(record: RequestRecord) -> None:
    """One line per ended request, on the logger `oaiserve.request`: a warning if it failed, else info."""
    level = logging.WARNING if record.outcome is Outcome.FAILED else logging.INFO
    if not logger.isEnabledFor(level):
        return
    times = record.times
    phases_ms = {f"{phase.name}_ms": round(phase.duration_ns / 1e6, 3) for phase in times.phases()}
    duration_ms = round(times.duration_ns / 1e6, 3)
    error = f" {record.error_type}" if record.error_type else ""
    message = (
        f"{record.operation} {record.model} {record.outcome}{error} {record.http_status or '-'} {duration_ms} ms "
        f"({' '.join(f'{name[:-3]} {value}' for name, value in phases_ms.items())}), tokens: "
        f"{record.prompt_tokens} prompt, {record.cached_tokens} cached, {record.completion_tokens} generated, "
        f"request {record.request_id}, trace {record.trace.trace_id_hex}"
    )
    fields = {
        "request_id": record.request_id,
        "trace_id": record.trace.trace_id_hex,
        "span_id": record.trace.span_id_hex,
        "operation": record.operation,
        "model": record.model,
        "outcome": str(record.outcome),
        "status": record.http_status,
        "error_type": record.error_type,
        "stream": record.stream,
        "finish_reasons": record.finish_reasons,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "num_preemptions": record.num_preemptions,
        "stalled_ms": round(record.stalled_ns / 1e6, 3),
        "duration_ms": duration_ms,
        **phases_ms,
    }
    logger.log(level, "%s", message, extra=fields)
