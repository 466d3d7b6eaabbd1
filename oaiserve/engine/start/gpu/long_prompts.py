"""Tries FlashAttention for long prompts. It is used if it agrees with Triton's kernels and is faster."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn import attention
from torch.nn.attention import varlen

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaExecutor, CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels
from oaiserve.engine.model.attention.paged_prompts import Attend
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.model.states import States
from oaiserve.engine.start.check import batch_of
from oaiserve.engine.start.gpu.kernels import logits_problem
from oaiserve.engine.start.gpu.trials import Trials

NUM_KEYS = 8192  # length of the measured prompt
NUM_TOKENS = 2048  # tokens at its end that are computed
REPEATS = 5


def flash_attention() -> Attend | None:
    """Return torch's function, which FlashAttention 3 or 4 computes on blocks of a cache, or None without a package."""
    function: Any = varlen.varlen_attn
    if "block_table" not in inspect.signature(function).parameters:  # torch before 2.12 lacks it.
        return None
    for name in ("FA3", "FA4"):
        with suppress(ImportError):
            attention.activate_flash_attention_impl(name)
            library: Attend = function
            return library
    return None


def device_seconds(call: Callable[[], object]) -> float:
    """Return the least time of a call on the GPU. The first call compiles, and doesn't count."""
    call()
    best_ms = math.inf
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return best_ms / 1e3


@torch.inference_mode()
def with_library(
    spec: ModelSpec,
    weights: CudaWeights,
    kernels: Kernels,
    block_size: int,
    trials: Trials,
    find: Callable[[], Attend | None] = flash_attention,
    seconds: Callable[[Callable[[], object]], float] = device_seconds,
) -> Kernels:
    """Return the kernels with attention that uses FlashAttention for long prompts, where it is used."""
    shapes = spec.kv_shapes.values()
    has_its_shapes = bool(shapes) and all(shape.key_dim == shape.value_dim for shape in shapes)
    if spec.dtype == torch.float32 or not has_its_shapes or spec.max_model_len < NUM_KEYS:
        trials.off["long_prompts"] = f"it is for 16 bits, {NUM_KEYS:,} tokens or more, and keys as wide as values"
        return kernels
    library = find()
    if library is None:
        trials.off["long_prompts"] = "no package with FlashAttention 3 or 4 is installed"
        return kernels
    triton_attention: Any = kernels.attention

    by_library = kernels._replace(attention=partial(triton_attention, library=library, least_tokens=0))

    def problem(_: Kernels) -> object | None:
        if difference := logits_problem(spec, weights, by_library, block_size):
            return difference
        theirs, ours = (seconds(_long_step(spec, weights, which, block_size)) for which in (by_library, kernels))
        return f"a step took {theirs:.2g} s, with Triton's kernels {ours:.2g} s" if theirs >= ours else None

    candidate = kernels._replace(attention=partial(triton_attention, library=library))
    if trials.tried("long_prompts", lambda: candidate, problem) is not None:
        return candidate
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    return kernels


def _long_step(spec: ModelSpec, weights: CudaWeights, kernels: Kernels, block_size: int) -> Callable[[], object]:
    """Return a function that computes the end of a long prompt."""
    sizes = {"num_blocks": -(-NUM_KEYS // block_size), "block_size": block_size}
    executor = CudaExecutor(weights, spec.kv_shapes, **sizes, kernels=kernels)
    step = prompt(NUM_KEYS, spec.vocab_size, block_size, start=NUM_KEYS - NUM_TOKENS)
    return partial(executor.forward, batch_of(step, spec, block_size, States.of(spec, 1)))
