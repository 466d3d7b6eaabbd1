"""Engines of real models in a simulated world."""

from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.start.plan import start_model
from oaiserve.engine.start.start_times import StartTimes
from oaiserve.storage.start_cache import AFTER_SECONDS
from tests.engine.doubles import SimulatedEngine
from tests.world.loop import World


def started_in(world: World, path: Path, **options: Any) -> SimulatedEngine:
    """Return an engine that is ready to run, once all that its start remembers has been written."""
    engine_options = EngineOptions(**{"explain": False, **options})
    served = start_model(path, engine_options, StartTimes(), lambda: None, world)
    world.settle(AFTER_SECONDS)
    return SimulatedEngine(EngineParts.of(served, engine_options, runtime=world, cores_ns=world.clock_ns))
