"""Captures work as CUDA graphs, on a separate stream and in memory that all graphs share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

Run = Callable[[], object]
Capture = Callable[[Run], Run]  # Runs its argument, and returns a function that launches the same work again.


class CudaCapture:
    """Captures CUDA graphs that share memory: a replay of one overwrites the tensors of others."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Run `run`, capture it, and return a function that replays it. Raises the error if the capture fails."""
        self._rehearse(run)
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would wait for the device and empty torch's cached memory before each capture.
        with self._on_stream():
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        return graph.replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed.

        With torch 2.11, the allocator stays in the capture if `capture_end` raises, and would never again free cached
        memory.
        """
        with suppress(RuntimeError):
            graph.capture_end()
        with suppress(RuntimeError):  # The allocator has left the capture.
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)

    def _rehearse(self, run: Run) -> None:
        """Run `run` before its capture, so that kernels are compiled, and libraries allocate their memory.

        An operation that waits for the device can't be captured. In this rehearsal, it raises an error that leaves
        torch usable. This applies to all threads, so no other thread may use the device.
        """
        with self._on_stream():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        # This `with` also restores the previous stream, which a failed capture doesn't.
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)
