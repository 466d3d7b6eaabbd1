"""Tries FlashAttention for long prompts. It is used if it agrees with Triton's kernels and is faster."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn import attention

from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels
from oaiserve.engine.executors.reference.place import new_cache
from oaiserve.engine.model.attention import Backend, Scoring
from oaiserve.engine.model.attention.paged_prompts import Attend
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.start.compare import Difference
from oaiserve.engine.start.gpu.kernels import logits_problem
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds
from oaiserve.engine.start.gpu.trials import Trials

NUM_KEYS = 8192  # length of the measured prompt
NUM_TOKENS = 2048  # tokens at its end that are computed


def flash_attention() -> Attend | None:
    """Return torch's function, which FlashAttention 3 or 4 computes on blocks of a cache, or None without a package."""
    from torch.nn.attention import varlen

    function: Any = varlen.varlen_attn
    if "block_table" not in inspect.signature(function).parameters:  # torch before 2.12 lacks it.
        return None
    for name in ("FA3", "FA4"):
        with suppress(ImportError):
            attention.activate_flash_attention_impl(name)
            found: Attend = function
            return found
    return None


@torch.inference_mode()
def long_prompts_checked(
    spec: ModelSpec,
    weights: CudaWeights,
    kernels: Kernels,
    block_size: int,
    trials: Trials,
    find: Callable[[], Attend | None] = flash_attention,
    seconds: Seconds = device_seconds,
) -> Attend | None:
    """Return the library's function if it is used for long prompts. The attention of `kernels` takes it, too."""
    num_keys = NUM_KEYS
    shapes = spec.kv_shapes.values()
    has_its_shapes = bool(shapes) and all(shape.key_dim == shape.value_dim for shape in shapes)
    if spec.dtype == torch.float32 or not has_its_shapes or spec.max_model_len < num_keys:
        trials.off["long_prompts"] = f"it is for 16 bits, {num_keys:,} tokens or more, and keys as wide as values"
        return None
    library = find()
    if library is None:
        trials.off["long_prompts"] = "no package with FlashAttention 3 or 4 is installed"
        return None
    slower: list[str] = []

    def problem(attend: Attend) -> Difference | None:
        triton_attention: Any = kernels.attention
        by_library = partial(triton_attention, library=attend, least_tokens=0)
        found = logits_problem(spec, weights, kernels._replace(attention=by_library), block_size)
        if found is None:
            ways: tuple[Backend, ...] = triton_attention, by_library
            ours, theirs = (
                _layer_seconds(spec, weights.most_heads, way, num_keys, block_size, seconds) for way in ways
            )
            slower.extend([f"it took {theirs:.2g} s, Triton's kernels {ours:.2g} s"] * (theirs >= ours))
        return found

    is_usable = trials.is_usable("long_prompts", lambda: problem(library))
    if is_usable and not slower:
        return library
    if slower:
        trials.off["long_prompts"] = slower[0]
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    return None


def _layer_seconds(
    spec: ModelSpec, heads: int, way: Backend, num_keys: int, block_size: int, seconds: Seconds
) -> float:
    """Return the time of the first layer's attention at the end of a prompt."""
    shape = next(iter(spec.kv_shapes.values()))
    num_blocks = -(-num_keys // block_size)
    cache = new_cache(shape, spec.dtype, spec.device, num_blocks=num_blocks, block_size=block_size)
    sizes = (heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim)
    query, key, value = (torch.zeros(NUM_TOKENS, *size, dtype=spec.dtype, device=spec.device) for size in sizes)
    step = prompt(num_keys, spec.vocab_size, block_size, start=num_keys - NUM_TOKENS)
    batch = build_batch(step, block_size, spec.device)
    return seconds(lambda: way(batch)(query, key, value, cache, Scoring(1.0)))
