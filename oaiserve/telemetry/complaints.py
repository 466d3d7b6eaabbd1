"""What an exporter of the SDK says about its tries: a line for each, kept out of the log and for one line of ours."""

from __future__ import annotations

import logging


class Complaints:
    """Listens to the logger of `exporter` until `stop`. `first`: of the last try; set it to None before each."""

    def __init__(self, exporter: object) -> None:
        self.first: str | None = None
        self._logger = logging.getLogger(type(exporter).__module__)
        self._logger.addFilter(self._hear)

    def stop(self) -> None:
        self._logger.removeFilter(self._hear)

    def _hear(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        if self.first is None:
            self.first = record.getMessage()
        return False
