"""Capture the log lines of requests."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from oaiserve.telemetry import logs


@contextmanager
def json_log() -> Iterator[io.StringIO]:
    """Capture the log lines of requests as JSON, one line each."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JSONFormatter())
    level = logs.logger.level
    logs.logger.addHandler(handler)
    logs.logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        logs.logger.removeHandler(handler)
        logs.logger.setLevel(level)
