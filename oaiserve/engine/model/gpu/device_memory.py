"""Measures how a GPU's memory is used, by computing the largest step before the KV cache is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.memory import MemoryUse, gib
from oaiserve.engine.model.rehearsal import largest_step
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.states import States
from oaiserve.engine.step import OutOfMemory
from oaiserve.errors import StartupError

# Attention reads keys in pieces: a step with a longer context takes more time, not more memory.
MOST_CONTEXT = 8192


class MemoryReading(NamedTuple):
    """The use of one GPU's memory, in bytes."""

    total: int
    free: int  # memory that no program uses
    reserved: int  # memory that torch has reserved
    in_tensors: int  # the part of the reserved memory that tensors use
    peak_in_tensors: int  # the most that tensors used at any time since the previous reading


class CudaMemory:
    """Reads the memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        """Let torch free unused memory, and return the use then."""
        device = self._device
        torch.cuda.synchronize(device)
        peak_in_tensors = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        in_tensors = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
        return MemoryReading(total, free, reserved, in_tensors, peak_in_tensors)


def measure(
    memory: CudaMemory,
    spec: ModelSpec,
    options: EngineOptions,
    make: Callable[[int], Executor],
    *,
    max_step_tokens: int,
    sample_ids: SampleIds | None,
    graph_bytes: int,
) -> MemoryUse:
    """Compute the largest step with a KV cache of one block, and return the uses of the memory.

    `make` returns an executor with a number of blocks. For `sample_ids` see `ModelRunner`. `graph_bytes` is the memory
    that CUDA graphs will take. Raises StartupError if there is not enough memory for that step.
    """
    before = memory.read()
    longest = min(spec.max_model_len, max(MOST_CONTEXT, max_step_tokens))
    step = largest_step(
        max_step_tokens=max_step_tokens, max_running=options.max_running, longest=longest, block_size=options.block_size
    )
    try:
        executor = make(1)
        states = States(spec.state_shapes, 1, spec.device) if spec.state_shapes else None
        runner = ModelRunner(executor, spec.device, options.block_size, sample_ids=sample_ids, states=states)
        runner.collect(runner.launch(step))
    except (OutOfMemory, torch.OutOfMemoryError) as error:
        raise StartupError(
            f"The model's weights take {gib(before.in_tensors)} GiB, and the {gib(before.free)} GiB that are free "
            f"beside them are too little for its largest step, of {step.num_tokens} tokens of {len(step.chunks)} "
            "sequences: lower --max-step-tokens or --max-running, end what else uses this GPU (nvidia-smi lists it), "
            "or take a smaller --dtype or quantized weights."
        ) from error
    del executor, runner, states
    after = memory.read()
    return MemoryUse(
        total=after.total,
        weights=before.in_tensors,
        step=after.peak_in_tensors - before.in_tensors,
        graphs=graph_bytes,
        others=max(0, after.total - after.free - after.reserved),
        utilization=options.gpu_memory_utilization,
    )
