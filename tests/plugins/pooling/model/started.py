"""Starts models for vectors and scores, as a server with the plug-in does."""

from pathlib import Path
from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.plugins.pooling import plugin
from tests.engine.doubles import SimulatedEngine


def started(model: Path, options: EngineOptions | None = None, **kwargs: Any) -> Engine:
    assert plugin.inner.starts is not None
    return SimulatedEngine.from_pretrained(model, options, ways=plugin.inner.starts, **kwargs)
