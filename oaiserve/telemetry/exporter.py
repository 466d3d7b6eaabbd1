"""Exports by one of OpenTelemetry's exporters, and gives the reason for a failure.

The SDK's exporters log a warning for each attempt to send. While a collector is down, that would fill the log.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """The reason why an export failed, and the error of an exporter that raised one."""

    why: str
    error: Exception | None = None


class Exporter:
    """An exporter of the SDK, of spans or of metrics, whose own warnings stay out of the log until `close`."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.first_warning = ""  # of the last export
        self._logger = logging.getLogger(type(exporter).__module__)
        self._logger.addFilter(self._filter)

    def export(self, data: object) -> Failure | None:
        self.first_warning = ""
        try:
            is_exported = self._exporter.export(data).name == "SUCCESS"
        except Exception as error:  # an exporter may raise anything, and the thread must survive it
            self.first_warning = repr(error)
            return Failure(repr(error), error)
        return None if is_exported else Failure(self.first_warning.rstrip(".") or "the exporter gave no reason")

    def close(self, *, has_ended: bool) -> None:
        """Shut the exporter down, which also interrupts its wait before a retry."""
        self._exporter.shutdown()
        if has_ended:
            self._logger.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.first_warning = self.first_warning or record.getMessage()
        return record.levelno < logging.WARNING
