"""Profiling of the engine thread: by torch's profiler, for a trace of some steps, and by NVTX, for NVIDIA's tools.

Both mark the parts of steps as ranges. The engine gives the names of the ranges.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class NvtxRanges:
    """Marks ranges with NVTX, on the calling thread. It needs torch with CUDA."""

    def __init__(self) -> None:
        self._is_open = False

    def begin(self, name: str) -> None:
        self.end()
        torch.cuda.nvtx.range_push(name)
        self._is_open = True

    def end(self) -> None:
        if self._is_open:
            torch.cuda.nvtx.range_pop()
            self._is_open = False


class _RecordedRanges:
    """Marks ranges among the recorded operations of torch's profiler."""

    def __init__(self) -> None:
        self._open: record_function | None = None

    def begin(self, name: str) -> None:
        self.end()
        self._open = record_function(name)
        self._open.__enter__()

    def end(self) -> None:
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)


class TorchRecording:
    """A finished recording of torch's profiler."""

    def __init__(self, recorded: profile) -> None:
        self._recorded = recorded

    def save(self, path: Path) -> None:
        """Write the trace, compressed. Torch could do so, but by way of a folder of all users."""
        plain = path.with_suffix("")
        self._recorded.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb") as target:
            shutil.copyfileobj(source, target)
        plain.unlink()


class TorchProfiler:
    """Records the operations of the thread that starts it, and all work of the device."""

    def __init__(self, device: torch.device) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def start(self) -> _RecordedRanges:
        started = profile(activities=self._activities)
        started.start()
        self._profile = started
        return _RecordedRanges()

    def stop(self) -> TorchRecording:
        recorded, self._profile = self._profile, None
        assert recorded is not None, "the profiler was not started"
        recorded.stop()
        return TorchRecording(recorded)
