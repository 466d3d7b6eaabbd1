"""Turns the warnings of OpenTelemetry's exporters into one log line of ours.

The SDK's exporters log a warning for each attempt to send. While a collector is down, that would fill the log.
"""

from __future__ import annotations

import logging


class ExporterLog:
    """Keeps warnings of the exporter's logger out of the log, from its construction until `stop` is called.

    `first_warning` is the first message since the caller last set it to None, which it does before each export.
    """

    def __init__(self, exporter: object) -> None:
        self.first_warning: str | None = None
        self._logger = logging.getLogger(type(exporter).__module__)
        self._logger.addFilter(self._filter)

    def stop(self) -> None:
        self._logger.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if self.first_warning is None:
            self.first_warning = record.getMessage()
        return False
