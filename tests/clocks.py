"""Replace the clock of the whole server by the clock of a test."""

import sys
from collections.abc import Callable

import pytest

from oaiserve.facts.times import RequestTimes


def put_on_clock(patch: pytest.MonkeyPatch, clock_ns: Callable[[], int]) -> None:
    """Patch the clock in all imported modules that read it directly. The engine gets its clock from its constructor."""
    for name, module in list(sys.modules.items()):
        if name.startswith("oaiserve.") and hasattr(module, "monotonic_ns"):
            patch.setattr(module, "monotonic_ns", clock_ns)
    patch.setattr(RequestTimes.ended, "__defaults__", (clock_ns,))
