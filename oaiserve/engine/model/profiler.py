"""Profiling of the engine thread by torch's profiler, for a trace of some steps, whose parts are ranges in it."""

from __future__ import annotations

import gzip
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function


class TorchRanges:
    """Marks ranges that follow each other, on the calling thread."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[object] | None = None

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

    def start(self) -> TorchRanges:
        started = profile(activities=self._activities)
        started.start()
        self._profile = started
        return TorchRanges()

    def stop(self) -> TorchRecording:
        recorded, self._profile = self._profile, None
        assert recorded is not None, "the profiler was not started"
        recorded.stop()
        return TorchRecording(recorded)
