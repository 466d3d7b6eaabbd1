"""The application of this package: replicas as in oaiserve.scale, whose engines have a device double for a model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.scale.on_ray.application import build
from tests.scale.ray_cluster.device_double import make_engine


def app(args: Mapping[str, Any]) -> Any:
    """Return the application; of its arguments, `step_ms` is what a step takes."""
    settings = {"model": "demo", "log_level": "warning"} | dict(args)
    step_ms = float(settings.pop("step_ms", 10))
    return build(settings, partial(load_double, step_ms))


def load_double(step_ms: float, config: Config) -> Engine:
    return make_engine(step_ms, config.engine)
