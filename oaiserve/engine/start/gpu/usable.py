"""Decides whether a faster way to compute is used: only if it has been tried, and no problem was found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from oaiserve.errors import StartupError
from oaiserve.files.load_errors import named

log = logging.getLogger(__name__)

T = TypeVar("T")


def is_usable(name: str, instead: str, problem: Callable[[], object | None]) -> bool:
    """Decide whether a faster way is used: only if `problem` finds none.

    Its finding, or its error, is logged as the reason why `name` is off.
    """
    try:
        found: object | None = problem()
    except StartupError:  # what was asked for is not possible: this is for the user
        raise
    except Exception as error:  # a compiler or a driver can raise anything, and the server runs without it
        found = named(error)
    if found is None:
        return True
    log.warning("%s: off, and %s: %s", name, instead, found)
    return False


def tried(name: str, instead: str, make: Callable[[], T], problem: Callable[[T], object | None]) -> T | None:
    """Make a faster way to compute, and return it if it is usable as `is_usable` says."""
    made: list[T] = []

    def make_and_look() -> object | None:
        made.append(make())
        return problem(made[0])

    return made[0] if is_usable(name, instead, make_and_look) else None
