"""A fake GPU for a dry run: torch's device `meta`, whose tensors have shapes and no numbers.

Models start on it as on a GPU, with kernels and graphs. Each launch of a kernel is noted and computes nothing, and so
does each replay of a graph. Draws are always the same token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.reference.executor import ReferenceExecutor
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.block_copies import BlockCopies
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.sampling import numpy_sampling
from oaiserve.engine.model.transfer import ReadBack
from oaiserve.engine.sequences.draw_columns import DrawRow
from oaiserve.engine.start import check
from oaiserve.plugins.cuda.executor import (
    triton_adapters,
    triton_attention,
    triton_latent,
    triton_layers,
    triton_products,
    triton_sampling,
    triton_states,
)
from oaiserve.plugins.cuda.executor.cuda_capture import CudaCapture, Run
from oaiserve.plugins.cuda.executor.executor import CudaExecutor, CudaWeights
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from oaiserve.plugins.cuda.start import comparison, on_gpu, probe
from oaiserve.plugins.cuda.start.features import BY_TORCH, Probed
from tools.gpu.launches import Launches

FAKE = torch.device("meta")
MULTIPROCESSORS = 132
TOTAL_BYTES = 80 << 30
DRAWN = 101  # the id that is drawn for each row
# The modules that launch kernels.
LAUNCHING: tuple[ModuleType, ...] = (
    triton_attention,
    triton_latent,
    triton_sampling,
    triton_adapters,
    triton_layers,
    triton_products,
    triton_states,
)


@contextmanager
def noted_kernels() -> Iterator[Launches]:
    """Replace the kernels, and yield their launches as they are noted."""
    launches = Launches()
    with ExitStack() as stack:
        for module in LAUNCHING:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                stack.enter_context(patch.object(module, name, launches.noted(getattr(module, name))))
            if hasattr(module, "num_multiprocessors"):
                stack.enter_context(patch.object(module, "num_multiprocessors", lambda device: MULTIPROCESSORS))
        yield launches


@contextmanager
def fake_device() -> Iterator[Launches]:
    """Replace what reads from a GPU in this process, and yield the launches as they are noted."""
    with ExitStack() as stack:
        launches = stack.enter_context(noted_kernels())

        def replaced(owner: Any, **by_name: Any) -> None:
            for name, replacement in by_name.items():
                stack.enter_context(patch.object(owner, name, replacement))

        replaced(torch.cuda, **_MEMORY)
        replaced(CudaWeights, __init__=_held(CudaWeights.__init__, launches, lambda weights: weights.num_bytes))
        replaced(CudaExecutor, __init__=_held(CudaExecutor.__init__, launches, _cache_bytes))
        replaced(torch, equal=_equal)
        replaced(CudaCapture, __init__=lambda self, device: None, __call__=_captured)
        replaced(BlockCopies, _store=lambda self, slots: None)
        replaced(ReadBack, __init__=_begin_read_back, wait=_read_back)
        replaced(ModelRunner, __init__=_asynchronous(ModelRunner.__init__))
        replaced(ReferenceExecutor, forward=_shapes_of_logits)
        replaced(numpy_sampling, sample_ids=_drawn)
        replaced(on_gpu, refuse_unless_finite=_only_computed, with_measured_scales=_with_scales_of_one)
        # The plain runner reads experts from the device, and results have no numbers that could differ.
        replaced(comparison, _plain_runner=lambda own, ways: own.new_runner(), _problem=lambda *_: None)
        replaced(comparison, notices_infinite=lambda *_: True)
        replaced(probe, tried=_tried)
        yield launches


def _tried(found: Probed, *_: Any, **__: Any) -> Probed:
    """Turn on all that torch computes in place of kernels."""
    return replace(found, verdict={**found.verdict, **dict.fromkeys(BY_TORCH, "")}, ways=ProductWays(rounded_from=64))


_MEMORY: dict[str, Callable[..., Any]] = {
    "synchronize": lambda device=None: None,
    "mem_get_info": lambda device=None: (TOTAL_BYTES, TOTAL_BYTES),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 1 << 30,
    "memory_reserved": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
}


def _held(make: Callable[..., None], launches: Launches, num_bytes: Callable[[Any], int]) -> Callable[..., None]:
    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        launches.hold(self, num_bytes(self))

    return made


def _cache_bytes(executor: CudaExecutor) -> int:
    return sum(blocks.nbytes for cache in executor.caches.values() for blocks in cache)


_equal_numbers = torch.equal


def _equal(one: Tensor, other: Tensor) -> bool:
    """Tensors without numbers are equal if their shapes are."""
    return one.shape == other.shape if one.device == FAKE else _equal_numbers(one, other)


def _captured(self: CudaCapture, run: Run) -> Run:
    run()
    return lambda: None


def _begin_read_back(self: ReadBack, tensors: list[Tensor]) -> None:
    self._tensors = tensors
    self.arrived = None


def _read_back(self: ReadBack) -> list[np.ndarray]:
    """Return arrays that are full of the id, which also says that all logits were finite."""
    types = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}
    return [np.full(tuple(tensor.shape), DRAWN, dtype=types[tensor.dtype]) for tensor in self._tensors]


def _asynchronous(make: Callable[..., None]) -> Callable[..., None]:
    def made(self: ModelRunner, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.is_asynchronous = True

    return made


def _shapes_of_logits(self: ReferenceExecutor, batch: Batch) -> Tensor:
    rows = len(batch.logits_rows)
    head = self._decoder.head.weight
    return torch.empty(rows, len(head), dtype=head.dtype, device=FAKE)


def _drawn(logits: Tensor, rows: list[DrawRow]) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(len(rows), dtype=torch.int64, device=logits.device),
        torch.empty(len(rows), dtype=torch.bool, device=logits.device),
    )


@torch.inference_mode()
def _only_computed(executor: Executor, spec: ModelSpec, block_size: int) -> None:
    for batch in check.batches(spec, block_size):
        executor.forward(batch)


def _with_scales_of_one(spec: ModelSpec, weights: CudaWeights, block_size: int) -> ModelSpec:
    return spec.with_scales(dict.fromkeys(spec.kv_shapes, (1.0, 1.0)))
