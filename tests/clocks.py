"""Replace the clock of the whole server by the clock of a test."""

import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import pytest

from oaiserve.facts.times import RequestTimes


def put_on_clock(patch: pytest.MonkeyPatch, clock_ns: Callable[[], int]) -> None:
    """Patch the clock in all imported modules that read it directly. The engine gets its clock from its constructor."""
    for module in _readers(len(sys.modules)):
        patch.setattr(module, "monotonic_ns", clock_ns)
    patch.setattr(RequestTimes.ended, "__defaults__", (clock_ns,))


@lru_cache(maxsize=1)
def _readers(num_imported: int) -> list[ModuleType]:
    """Return the modules that read the clock. Finding them takes 10 ms, so it is done again only after an import."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith("oaiserve.")]
    return [module for module in modules if hasattr(module, "monotonic_ns")]
