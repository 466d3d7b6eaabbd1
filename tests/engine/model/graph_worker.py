"""The worker process of a model that is split, with a double for CUDA graphs: it runs again what it was to capture.

With `OAISERVE_TEST_GRAPHS_FAIL`, its second capture fails. The test's own process uses the same doubles.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.decode_forwards import Run
from oaiserve.engine.start import worker
from oaiserve.engine.start.gpu import fast_paths
from oaiserve.engine.start.ways import gpu as way
from tests.engine.model.gpu.graphs import padded_attention

FAILS = "OAISERVE_TEST_GRAPHS_FAIL"


class Again:
    """Captures nothing: what is replayed runs again, on the same tensors."""

    fails = False
    released_in_group: ClassVar[list[bool]] = []

    def __init__(self, device: torch.device) -> None:
        self._num_recorded = 0

    def __call__(self, run: Run) -> Run:
        self.rehearse(run)
        return self.record(run)

    def rehearse(self, run: Run, *, may_wait: bool = False) -> None:
        run()

    def record(self, run: Run) -> Run:
        self._num_recorded += 1
        if self.fails and self._num_recorded == 2:
            raise RuntimeError("a graph too many")
        return run

    def release(self) -> None:
        self.released_in_group.append(dist.is_initialized())


def with_doubles(patch: pytest.MonkeyPatch) -> None:
    """Let a process on a CPU start as if it had a GPU that captures graphs."""
    Again.released_in_group.clear()
    with_cache = EagerExecutor.with_cache

    def with_a_block_for_padding(loaded: Any, *, num_blocks: int, **arguments: Any) -> EagerExecutor:
        return with_cache(loaded, num_blocks=num_blocks + 1, **arguments)

    patch.setattr(EagerExecutor, "with_cache", with_a_block_for_padding)
    patch.setattr(fast_paths, "select_backend", lambda device, name: padded_attention)
    patch.setattr(fast_paths.FastPaths, "have_graphs", True)
    patch.setattr(way, "CudaCapture", Again)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))


if __name__ == "__main__":
    with_doubles(pytest.MonkeyPatch())
    Again.fails = FAILS in os.environ
    worker.main()
