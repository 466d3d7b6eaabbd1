"""`EngineServing`: what routes of a server reach through `app.state.serving`, as far as a gateway in front of foreign
engines has it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from oaiserve import __version__
from oaiserve.config import Config
from oaiserve.plugins.gateway.engines.fleet import Fleet
from oaiserve.plugins.gateway.engines.passed import NamedModel
from oaiserve.runtime import Runtime
from oaiserve.telemetry import Telemetry

if TYPE_CHECKING:
    from oaiserve.engine.types.adapters import ServedAdapter
    from oaiserve.engine.types.pooling import Task
    from oaiserve.routes.exchange import Exchange

UNKNOWN_MODEL = "unknown"  # the model of requests to engines that list none


@dataclass(slots=True)
class EngineServing:
    """The `AnyServing` of a gateway in front of foreign engines."""

    settings: Config
    engine: Fleet
    telemetry: Telemetry
    runtime: Runtime
    exchanges: dict[str, Exchange] = field(default_factory=dict)  # open requests, by unique id
    task: ClassVar[Task] = "generate"
    version: ClassVar[str] = __version__

    @property
    def config(self) -> Config:
        """Return the settings, with the first engine's first model once it is known."""
        return replace(self.settings, model=next(iter(self.engine.models), UNKNOWN_MODEL))

    def name_of(self, model: ServedAdapter | NamedModel | None, /) -> str:
        """Return the name of a request's model, which is never one that only a client sent."""
        return next(iter(self.engine.models), UNKNOWN_MODEL) if model is None else model.name
