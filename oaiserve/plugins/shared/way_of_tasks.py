"""The way to start a model for certain tasks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oaiserve.engine.served_model import ServedModel
    from oaiserve.engine.start.request import StartRequest
    from oaiserve.engine.types.pooling import Task


class WayOfTasks:
    """Starts models for these tasks by the function `start` of a module, which is imported, with torch, when a model
    starts. `against` is the reason against all others."""

    def __init__(self, name: str, tasks: tuple[Task, ...], against: str, module: str) -> None:
        self.name = name
        self._tasks = tasks
        self._against = against
        self._module = module

    def accepts(self, request: StartRequest) -> str | None:
        return None if request.task in self._tasks else self._against

    def start(self, request: StartRequest) -> ServedModel:
        with request.importing_transformers():
            module = import_module(self._module)
        model: ServedModel = module.start(request)
        return model
