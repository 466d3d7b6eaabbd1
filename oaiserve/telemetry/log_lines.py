"""Formatters of log lines for people: `ConsoleFormatter` is complete, `ShortFormatter` is for a terminal. Stdlib only.

Both escape text that a client could have sent. The short line of a request is made from the fields of its JSON line.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from oaiserve.facts.times import ALL_PHASES, duration
from oaiserve.screen import Screen, Style
from oaiserve.telemetry.log_limit import REQUESTS

# Characters that move a terminal's cursor, end a line, or change the reading order.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_LEAST_PHASE = 0.1  # Phases other than prefill and decode are shown from this share of the duration on.
_ID_CHARACTERS = 12  # length to which a request id is cut if it doesn't fit
_LEVELS: dict[int, tuple[str, tuple[Style, ...]]] = {
    logging.WARNING: ("warning: ", ("yellow",)),
    logging.ERROR: ("error: ", ("red",)),
    logging.CRITICAL: ("error: ", ("red",)),
}


def escaped(text: str) -> str:
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _TextFormatter(logging.Formatter):
    """Escapes messages, which may quote a client, and keeps each on one line. The lines of a traceback are indented by
    two spaces."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message).replace("\n", "\\n")
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "  " + escaped(super().formatException(ei)).replace("\n", "\n  ")


class ConsoleFormatter(_TextFormatter):
    """Formats complete lines in local time: `2026-11-20 08:14:02.123 INFO     oaiserve.app  message`."""

    default_msec_format = "%s.%03d"

    def __init__(self, model: str | None = None) -> None:
        if model is None:
            shown = ""
        else:
            shown = f"[{escaped(model).replace('%', '%%')}] "
        super().__init__(f"%(asctime)s %(levelname)-8s {shown}%(name)s  %(message)s")


class ShortFormatter(_TextFormatter):
    """Formats one short line per message, in local time: `18:27:04 chat 200 349 ms 128→24 tok  prefill 95.1 ms`.

    The line of a request ends with its address, or its id as a link to it. On a narrow terminal the id is cut, and the
    less important parts are left out. `address_of` maps a request id to the address of its page.
    """

    def __init__(
        self, screen: Screen, model: str | None = None, address_of: Callable[[str], str | None] | None = None
    ) -> None:
        super().__init__()
        self._screen = screen
        self._model = model and escaped(model)
        self._address_of = address_of

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record)
        clock = self._screen.painted(time.strftime("%H:%M:%S", time.localtime(record.created)), "dim")
        if record.name == REQUESTS and hasattr(record, "request_id"):
            return f"{clock} {self._request(vars(record))}"
        word, styles = _LEVELS.get(record.levelno, ("", ()))
        if record.levelno < logging.INFO:
            word = f"{record.name}: "
            styles = ("dim",)
        of_model = f"[{self._model}] " if self._model else ""
        return f"{clock} {of_model}{self._screen.painted(word + message, *styles)}"

    def _request(self, fields: Mapping[str, Any]) -> str:
        """Return the line of a request without its time of day, no wider than the terminal if possible."""
        status, styles = _status(fields)
        operation = str(fields["operation"]).removeprefix("text_")
        if self._model:
            operation += f" {escaped(str(fields['model']))}"
        shown_times = _times(fields)
        head = f"{operation} {status} {shown_times[0]}"
        painted = f"{operation} {self._screen.painted(status, *styles)} {self._screen.painted(shown_times[0], 'bold')}"
        tokens = _tokens(fields)
        error = fields["error_type"] or ""
        if fields["error_param"]:
            error += f": {escaped(str(fields['error_param']))}"
        details = [part for part in (tokens, error) if part]
        extra = shown_times[1:]
        if fields["cached_tokens"]:
            extra.append(f"{fields['cached_tokens']:,} cached")
        if fields["client"]:
            extra.append(escaped(str(fields["client"])))
        request_id = escaped(str(fields["request_id"]))
        url = None if self._address_of is None else self._address_of(request_id)
        label, extra = self._fitting(len("00:00:00 ") + len("  ".join([head, *details])), extra, request_id, url)
        if label:
            linked = self._screen.linked(self._screen.painted(label, "dim"), url)
        else:
            linked = ""
        parts = [painted + (f" {tokens}" if tokens else "")]
        parts += [self._screen.painted(error, *styles)] if error else []
        parts += [self._screen.painted(part, "dim") for part in extra]
        return "  ".join([*parts, *filter(None, [linked])])

    def _fitting(self, width: int, extra: list[str], request_id: str, url: str | None) -> tuple[str, list[str]]:
        """Return the request's label and the extra parts that still fit after `width` columns. The label may be ""."""
        columns = self._screen.columns()
        labels = [url, request_id] if url else [request_id]
        if columns is None:
            return labels[0], extra
        if len(request_id) <= _ID_CHARACTERS:
            short = request_id
        else:
            short = f"{request_id[:_ID_CHARACTERS]}…"
        for label in [*labels, short]:
            if width + sum(len(part) + 2 for part in [*extra, label]) <= columns:
                return label, extra
        while extra and width + sum(len(part) + 2 for part in [*extra, short]) > columns:
            extra = extra[:-1]
        return short if width + 2 + len(short) <= columns else "", extra


def _status(fields: Mapping[str, Any]) -> tuple[str, tuple[Style, ...]]:
    """Return the status of a request, or its outcome if the status doesn't show how it ended."""
    outcome = fields["outcome"]
    status = fields["status"]
    if outcome == "finished":
        return str(status), ("green",)
    styles: tuple[Style, ...] = ("red", "bold") if outcome == "failed" else ("yellow",)
    return str(status) if status and status >= 400 else outcome, styles


def _times(fields: Mapping[str, Any]) -> list[str]:
    """Return the duration of a request and its important phases."""
    duration_ms = fields["duration_ms"]
    times = [duration(duration_ms * 1e6)]
    for phase in ALL_PHASES:
        phase_ms = fields.get(f"{phase}_ms")
        if phase_ms is None or phase_ms == duration_ms:
            continue
        if phase in ("prefill", "decode") or phase_ms >= _LEAST_PHASE * duration_ms:
            times.append(f"{phase.replace('_', ' ')} {duration(phase_ms * 1e6)}")
    return times


def _tokens(fields: Mapping[str, Any]) -> str:
    prompt = fields["prompt_tokens"]
    generated = fields["completion_tokens"]
    if not prompt:
        return ""
    if generated:
        return f"{prompt:,}→{generated:,} tok"
    return f"{prompt:,} tok"
