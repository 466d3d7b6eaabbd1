"""Runs a test in many schedules, each of which follows from a seed.

SEED=7 runs only that one, which a failure names. SCHEDULES=1000 runs that many times as many, from other seeds.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from typing import Any

import pytest

from tests.world.loop import World

ON_TIME = 1e-9  # decides only who goes first of those that could go at the same time
MOST_LATE_SECONDS = (ON_TIME, 1e-5, 1e-3, 0.1)  # how late workers may be, which differs between schedules


def schedules(number: int, *, is_late: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test `number` times, each with another `world`. A failure says which seed repeats it. Unless `is_late`,
    workers wake up on time, in any order."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def run(**given: Any) -> None:
            for seed in seeds(number):
                with in_world(seed, is_late=is_late) as world:
                    test(world=world, **given)

        parameters = [each for name, each in signature(test).parameters.items() if name != "world"]
        run.__signature__ = signature(test).replace(parameters=parameters)  # type: ignore[attr-defined]
        return pytest.mark.schedules(run)

    return decorate


def seeds(number: int) -> Iterator[int]:
    if "SEED" in os.environ:
        yield int(os.environ["SEED"])
        return
    yield from range(number * int(os.environ.get("SCHEDULES", "1")))


@contextmanager
def in_world(seed: int, *, is_late: bool = True) -> Iterator[World]:
    """Make a world for a schedule. An error gets a note with the seed."""
    world = World(seed)
    world.most_late_seconds = world.random.choice(MOST_LATE_SECONDS) if is_late else ON_TIME
    try:
        yield world
    except BaseException as error:
        error.add_note(f"SEED={seed} repeats this schedule.")
        raise
    finally:
        world.leave()
        world.close()
