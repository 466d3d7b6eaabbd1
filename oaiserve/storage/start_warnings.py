"""Collects the warnings of a part of a start, so that later starts, which skip it, can repeat them. Stdlib only."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import NamedTuple


class Warned(NamedTuple):
    """A log message about a model's files, which a start has written."""

    logger: str
    level: int
    message: str


class _Collector(logging.Handler):
    """Collects the warnings of the thread that creates it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.collected: list[Warned] = []
        self._thread = get_ident()
        self._last: logging.LogRecord | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread and record is not self._last:
            self.collected.append(Warned(record.name, record.levelno, record.getMessage()))
        self._last = record


@contextmanager
def collected_warnings() -> Iterator[list[Warned]]:
    """Yield a list that receives each warning, and each error, that this thread logs in the `with` block."""
    collector = _Collector()
    # transformers stops its loggers from passing records on to the root when it is imported, which may happen in the
    # `with` block.
    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    for logger in loggers:
        logger.addHandler(collector)
    try:
        yield collector.collected
    finally:
        for logger in loggers:
            logger.removeHandler(collector)


def repeat(warned: Iterable[Warned]) -> None:
    """Log warnings of an earlier start."""
    for logger, level, message in warned:
        logging.getLogger(logger).log(level, "%s", message)
