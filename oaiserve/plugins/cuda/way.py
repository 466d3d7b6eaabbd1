"""The entry to start a text model on a GPU. A start on a CPU imports nothing else of this plug-in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oaiserve.engine.start.request import ON_GPU

if TYPE_CHECKING:
    from oaiserve.engine.served_model import ServedModel
    from oaiserve.engine.start.request import StartRequest


class OnGpu:
    """Starts a model with a description on one GPU."""

    name = ON_GPU

    def accepts(self, request: StartRequest) -> str | None:
        from oaiserve.engine.model.device import select_device  # Torch has been imported by now.

        if request.task != "generate":
            return f"it is for --task {request.task}"
        if select_device(request.options.device).type == "cpu":
            return "its device is the CPU"
        return None

    def start(self, request: StartRequest) -> ServedModel:
        with request.times.part("import of the kernels"):
            from oaiserve.plugins.cuda.start.on_gpu import start
        return start(request)
