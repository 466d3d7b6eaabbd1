"""Captures a forward at all members of a tensor-parallel model: each has its shard, with the sums, as a graph.

A capture runs the work once before, on the device. A member that failed there would leave the others waiting for its
part of a sum. So each member first runs its shard without the others, and all agree. During a capture nothing runs, so
a member may fail there, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from oaiserve.engine.model.gpu.cuda_capture import CudaCapture
from oaiserve.engine.model.gpu.decode_forwards import Run
from oaiserve.engine.model.parallel.sums import ElsewhereError, Sums
from oaiserve.errors import StartupError

T = TypeVar("T")


class MembersCapture:
    """Captures forwards. All members call it at the same time, with the same work, within `make`."""

    def __init__(self, recorder: CudaCapture, sums: Sums) -> None:
        self._recorder = recorder
        self._sums = sums
        self._has_failed = False  # and the others know, or cannot learn it

    def make(self, make: Callable[[], T]) -> T:
        """Call `make`, and return its result. If it raises at one member, even between two captures, raise at all."""
        self._has_failed = False
        try:
            made = make()
        except Exception:
            if not self._has_failed:
                self._sums.all_agree(False)
            raise
        if not self._sums.all_agree(True):
            raise ElsewhereError
        return made

    def __call__(self, run: Run) -> Run:
        """Run and capture this member's shard. If one member fails, all others raise an ElsewhereError."""

        def run_alone() -> None:
            with self._sums.left_out():
                self._recorder.rehearse(run)

        self._agreed(run_alone)
        try:
            self._recorder.rehearse(run, may_wait=True)
        except Exception as error:
            # The others wait for this member's part of a sum, on their devices.
            self._has_failed = True
            raise StartupError(
                f"A part of the model has failed in a step that is to become a CUDA graph ({error}). "
                "--no-cuda-graph starts without these."
            ) from error
        return self._agreed(lambda: self._recorder.record(run))

    def _agreed(self, do: Callable[[], T]) -> T:
        try:
            result = do()
        except Exception:
            self._has_failed = True
            self._sums.all_agree(False)
            raise
        if not self._sums.all_agree(True):
            self._has_failed = True
            raise ElsewhereError
        return result
