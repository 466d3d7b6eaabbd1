"""The worker process of a model that is split, with a double for CUDA graphs: it runs again what it was to capture.

With `OAISERVE_TEST_GRAPHS_FAIL`, its second capture fails. The test's own process uses the same doubles.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.decode_forwards import Run
from oaiserve.engine.start import worker
from oaiserve.engine.start.gpu import fast_paths
from oaiserve.engine.start.ways import split as start_split

FAILS = "OAISERVE_TEST_GRAPHS_FAIL"
TILE_TOKENS = 4


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


def attention(batch: Batch) -> ReferenceAttention:
    """Attend as kernels do in a captured step, which read lengths on the device. Padding writes into the last slot."""
    slots = torch.where(batch.slots < 0, -1, batch.slots)
    if batch.tiles is None:
        return ReferenceAttention(replace(batch, slots=slots, seq_lens=batch.seq_lens.clamp(min=1)))
    tiles = batch.tiles.of(TILE_TOKENS)
    query_lens = [length for length in batch.query_start.diff().tolist() if length]
    number = len(query_lens)
    assert int(tiles[:, 2].sum()) == sum(query_lens), "all members have the tiles of the step"
    of_step = replace(
        batch,
        slots=slots,
        table_rows=batch.table_rows[:number],
        query_start=batch.query_start[: number + 1],
        seq_lens=batch.seq_lens[:number],
        query_lens=query_lens,
        context_lens=batch.seq_lens[:number].tolist(),
        tiles=None,
    )
    return ReferenceAttention(of_step)


def with_doubles(patch: pytest.MonkeyPatch) -> None:
    """Let a process on a CPU start as if it had a GPU that captures graphs."""
    Again.released_in_group.clear()
    with_cache = EagerExecutor.with_cache

    def with_a_block_for_padding(loaded: Any, *, num_blocks: int, **arguments: Any) -> EagerExecutor:
        return with_cache(loaded, num_blocks=num_blocks + 1, **arguments)

    patch.setattr(EagerExecutor, "with_cache", with_a_block_for_padding)
    patch.setattr(fast_paths, "backend_for", lambda loaded, name: attention)
    patch.setattr(fast_paths.FastPaths, "have_graphs", True)
    patch.setattr(start_split, "CudaCapture", Again)
    patch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))


if __name__ == "__main__":
    with_doubles(pytest.MonkeyPatch())
    Again.fails = FAILS in os.environ
    worker.main()
