"""Ranges recorded through torch: NVTX for a model on a GPU, and ITT on a CPU. Imported only with --nvtx."""

from __future__ import annotations

import torch
from torch.profiler import itt

from oaiserve.engine.profiler_ranges import Ranges
from oaiserve.errors import StartupError


class NvtxRanges:
    """Ranges for Nsight Systems and other tools of NVIDIA."""

    def push(self, name: str) -> None:
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        torch.cuda.nvtx.range_pop()

    def start(self, phase: str, request_id: str) -> int:
        return torch.cuda.nvtx.range_start(f"{phase} {request_id}")

    def end(self, started: int) -> None:
        torch.cuda.nvtx.range_end(started)


class IttRanges:
    """Tasks for VTune.

    torch's tasks can't overlap, so one empty task marks the beginning of a request's phase, and another one its end.
    Their names don't contain the request's id, because ITT never frees a name.
    """

    def push(self, name: str) -> None:
        itt.range_push(name)

    def pop(self) -> None:
        itt.range_pop()

    def start(self, phase: str, request_id: str) -> str:
        itt.mark(f"{phase} begins")
        return phase

    def end(self, started: str) -> None:
        itt.mark(f"{started} ends")


def ranges_on(device: str) -> Ranges:
    """Return the ranges of a model on this device. Raises StartupError if this build of torch has none for it."""
    if device != "cpu":
        return NvtxRanges()
    if not itt.is_available():
        raise StartupError(
            "--nvtx marks ranges by ITT on a CPU, and this build of torch has none. Serve without --nvtx, or on a GPU."
        )
    return IttRanges()
