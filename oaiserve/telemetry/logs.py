"""Logging for the whole process, in formats for people or as JSON, with one line for each ended request.

This module uses only the standard library's logging. It never logs the text of a prompt or of an answer. Repeated
messages that clients can cause are limited (`log_limit`).
"""

from __future__ import annotations

import json
import logging
import select
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, TextIO

from oaiserve.config import LogFormat
from oaiserve.facts.record import FURTHER_CLIENTS, Outcome, RequestRecord
from oaiserve.facts.times import duration
from oaiserve.runtime import THREADS
from oaiserve.screen import Screen
from oaiserve.telemetry.log_limit import REQUESTS, LogLimit
from oaiserve.telemetry.log_lines import ConsoleFormatter, ShortFormatter
from oaiserve.telemetry.record_facts import in_ms, log_fields, mean_event_tokens, steps_of, token_gaps

logger = logging.getLogger(REQUESTS)

# Attributes that every LogRecord has; any other one came from `extra`. uvicorn's `color_message` repeats the message.
_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName", "color_message"}


class JSONFormatter(logging.Formatter):
    """Formats one JSON object per line: ts (UTC), level, logger, message, the extra fields, and any `exception`.

    The line of a request contains the address of its page, which `address_of` returns.
    """

    def __init__(self, model: str | None = None, address_of: Callable[[str], str | None] | None = None) -> None:
        super().__init__()
        self._own = {} if model is None else {"process_model": model}
        self._address_of = address_of

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._own,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD and name not in line}
        if record.name == REQUESTS and self._address_of is not None:
            url = self._address_of(line["request_id"])
            if url is not None:
                line["request_url"] = url
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Handler(logging.StreamHandler[TextIO]):
    """Writes lines above the progress bars on the same terminal.

    A write to a pipe or terminal that nobody reads blocks, and the event loop with it. So only the first such line
    waits, for STALL_MS, and later lines are left out until the stream can be written to again.
    """

    STALL_MS = 1000

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._num_missing = 0

    def emit(self, record: logging.LogRecord) -> None:
        if not self._can_write():
            self._num_missing += 1
            return
        if self._num_missing:
            message = f"{self._num_missing} lines of the log are missing here, because it was not read"
            self._num_missing = 0
            self._write(
                logging.makeLogRecord({"name": __name__, "levelno": 30, "levelname": "WARNING", "msg": message})
            )
        self._write(record)

    def _write(self, record: logging.LogRecord) -> None:
        tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
        with nullcontext() if tqdm is None else tqdm.external_write_mode(self.stream):
            super().emit(record)

    def _can_write(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self.stream.fileno(), select.POLLOUT)
        except (OSError, ValueError):  # a stream in memory, or one that has been closed
            return True
        return bool(poll.poll(0 if self._num_missing else self.STALL_MS))


def resolved(form: LogFormat, stream: TextIO | None = None) -> LogFormat:
    """Return the format that `auto` stands for: `short` on a terminal, else `json`."""
    if form != "auto":
        return form
    if (stream or sys.stderr).isatty():
        return "short"
    return "json"


def configure(
    level: str = "INFO",
    form: LogFormat = "console",
    stream: TextIO | None = None,
    model: str | None = None,
    address_of: Callable[[str], str | None] | None = None,
) -> LogLimit:
    """Set up logging for the whole process, and return the limit on its messages. Call it once, at the start.

    The default `stream` is standard error. Each line names the `model`, if one is given. `address_of` maps a request id
    to the address of its page, or to None if it has none. Start uvicorn with `log_config=None`, so that it does not
    replace this setup.
    """
    handler = _Handler(stream or sys.stderr)
    form = resolved(form, handler.stream)
    if form == "json":
        handler.setFormatter(JSONFormatter(model, address_of))
    elif form == "short":
        handler.setFormatter(ShortFormatter(Screen.of(handler.stream), model, address_of))
    else:
        handler.setFormatter(ConsoleFormatter(model))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        uvicorn_logger = logging.getLogger(name)
        uvicorn_logger.handlers.clear()
        uvicorn_logger.propagate = True
    # The server logs its start and its end itself, so uvicorn need not.
    least = logging.getLevelNamesMapping()[level.upper()]
    is_hidden = form == "json" or (form == "short" and not handler.stream.isatty())
    logging.getLogger("oaiserve.checkpoints.progress").setLevel(logging.ERROR if is_hidden else least)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING if least == logging.INFO else least)
    # `log_request` writes more than uvicorn's access line, and only after the answer has ended.
    logging.getLogger("uvicorn.access").disabled = True
    # This logger would quote a client's malformed tracestate header, which is ignored anyway.
    logging.getLogger("opentelemetry.trace.span").setLevel(logging.ERROR)
    return LogLimit(handler, THREADS.clock_ns)


def log_request(record: RequestRecord) -> None:
    """Log one line for an ended request by the logger `oaiserve.request`: a warning if it failed, else info."""
    if record.outcome is Outcome.FAILED:
        level = logging.WARNING
    else:
        level = logging.INFO
    if not logger.isEnabledFor(level):
        return
    times = record.times
    account = record.account
    phases_ns = {phase.name: phase.duration_ns for phase in times.phases()}
    waits_ns = {reason.value: wait_ns for reason, wait_ns in account.waits_ns.items() if wait_ns}
    steps = steps_of(record)
    gaps = token_gaps(record.event_gaps_ns)
    fields = {
        **log_fields(record),
        "outcome": record.outcome.value,
        "trace_id": record.trace.trace_id_hex,
        "span_id": record.trace.span_id_hex,
        "duration_ms": in_ms(times.duration_ns),
        **{f"{name}_ms": in_ms(phase_ns) for name, phase_ns in phases_ns.items()},
        **{f"queue_{reason}_ms": in_ms(wait_ns) for reason, wait_ns in waits_ns.items()},
    }
    calls = {outcome.value: number for outcome, number in record.tool_calls.items()}
    fields |= {f"tool_calls_{outcome}": number for outcome, number in calls.items()}
    error = f" {record.error_type}" if record.error_type else ""
    error += f" ({record.error_param})" if record.error_param else ""
    message = (
        f"{record.operation} {record.model} {record.outcome}{error} {record.http_status or '-'} "
        f"{duration(times.duration_ns)} ({_named(_durations(phases_ns))}), "
        f"tokens: {record.prompt_tokens} prompt, {record.cached_tokens} cached, "
        f"{record.generated_tokens} generated, "
    )
    if account.grammar_kind is not None:
        message += f"grammar {account.grammar_kind}: "
        if account.grammar_compile_ns is not None:
            message += f"compiled in {duration(account.grammar_compile_ns)} ({account.grammar_cache}), "
        message += f"masked draws {account.num_masked_draws}, forced tokens {account.num_forced_tokens}, "
    if (media := account.media).num:
        message += f"images: {media.num_images}, sounds: {media.num_sounds}, cached: {media.num_cached}, "
        message += f"their tokens: {media.num_tokens}, "
    if account.num_draft_tokens:
        message += f"draft tokens {account.num_draft_tokens}, accepted {account.num_accepted_tokens}, "
    if calls:
        message += f"tool calls: {_named(calls)}, "
    if waits_ns:
        message += f"waited: {_named(_durations(waits_ns))}, "
    if clients_ns := account.other_clients_ns:
        client, client_ns = next(iter(clients_ns.items()))
        client = "" if client == FURTHER_CLIENTS else client
        fields |= {"other_clients_ms": in_ms(sum(clients_ns.values())), "most_other_client": client}
        message += f"for other clients: {duration(sum(clients_ns.values()))}"
        message += f" (most for {client}: {duration(client_ns)}), " if client else ", "
    if steps is not None:
        mean_batch = round(steps.mean_sequences, 2)
        fields |= {"num_steps": steps.number, "mean_batch": mean_batch}
        message += f"{steps.number} steps of {mean_batch}, "
    if gaps is not None:
        fields |= {"itl_p50_ms": in_ms(gaps.p50_ns), "itl_p99_ms": in_ms(gaps.p99_ns), "itl_max_ms": in_ms(gaps.max_ns)}
        message += f"itl {duration(gaps.p50_ns)} p50 {duration(gaps.p99_ns)} p99, "
    if (event_tokens := mean_event_tokens(record)) is not None:
        fields["mean_event_tokens"] = round(event_tokens, 2)
        message += f"{fields['mean_event_tokens']} tokens per event, "
    if record.adapted:
        first, *others = record.adapted
        message += f"adapted: {first}{f' and {len(others)} more' if others else ''}, "
    if record.client is not None:
        message += f"client {record.client}, "
    message += f"request {record.request_id}, trace {record.trace.trace_id_hex}"
    logger.log(level, "%s", message, extra=fields)


def _durations(times_ns: Mapping[str, int]) -> dict[str, str]:
    return {name: duration(ns) for name, ns in times_ns.items()}


def _named(values: Mapping[str, object]) -> str:
    return " ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
