"""The way to start a model that turns texts into vectors or scores. Imports no torch before such a model is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.engine.start.request import StartRequest

if TYPE_CHECKING:
    from oaiserve.engine.served_model import ServedModel


class ToPool:
    name = "to pool"

    def accepts(self, request: StartRequest) -> str | None:
        if request.task not in ("embed", "score"):
            return "it makes neither vectors nor scores"
        return None

    def start(self, request: StartRequest) -> ServedModel:
        with request.importing_transformers():
            from oaiserve.plugins.pooling.model.load import start
        return start(request)
