"""The way to start a model that transcribes speech. Imports no torch before such a model is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.engine.start.request import StartRequest

if TYPE_CHECKING:
    from oaiserve.engine.served_model import ServedModel


class ToTranscribe:
    name = "to transcribe"

    def accepts(self, request: StartRequest) -> str | None:
        if request.task == "transcribe":
            return None
        return "it transcribes no speech"

    def start(self, request: StartRequest) -> ServedModel:
        with request.importing_transformers():
            from oaiserve.plugins.speech.model.load import start
        return start(request)
