"""Waits for what no event reports."""

import time
from collections.abc import Callable

LIMIT_SECONDS = 120  # on a busy machine


def rest() -> None:
    """Let time pass. A test in a world has another one."""
    time.sleep(0.005)


def wait_until(condition: Callable[[], object]) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        rest()
