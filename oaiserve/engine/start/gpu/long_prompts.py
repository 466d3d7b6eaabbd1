"""Tries FlashAttention for long prompts, which is used if it computes the same as Triton's kernels, and faster."""

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
from oaiserve.engine.executors.reference.place import new_cache
from oaiserve.engine.model.attention import Backend, Scoring
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.start.compare import Difference
from oaiserve.engine.start.gpu.kernels import attention_problem
from oaiserve.engine.start.gpu.timing import Seconds, device_seconds
from oaiserve.engine.start.gpu.trials import Trials

NUM_TOKENS = 2048  # of the prompt's end that is measured


def flash_attention() -> Callable[..., torch.Tensor]:
    """Return torch's function, computed by FlashAttention 3 or 4 if a package with it is installed, else by 2."""
    from torch.nn.attention import varlen

    function: Any = varlen.varlen_attn
    for name in ("FA3", "FA4"):
        with suppress(ImportError):
            attention.activate_flash_attention_impl(name)
            break
    asks = "enable_gqa" in inspect.signature(function).parameters  # torch 2.11 does not
    return partial(function, enable_gqa=True) if asks else function


@torch.inference_mode()
def long_prompts_checked(
    spec: ModelSpec,
    weights: CudaWeights,
    triton_attention: Callable[..., Any],
    block_size: int,
    trials: Trials,
    find: Callable[[], Callable[..., torch.Tensor]] = flash_attention,
    seconds: Seconds = device_seconds,
) -> LongPrompts | None:
    """Return the attention of long prompts by a library; None: it is not used. `triton_attention` is the backend, which
    takes LongPrompts, too."""
    num_keys, shapes = LongPrompts._field_defaults["least_keys"], spec.kv_shapes.values()
    has_its_shapes = bool(shapes) and all(shape.key_dim == shape.value_dim for shape in shapes)
    if spec.dtype == torch.float32 or not has_its_shapes or spec.max_model_len < num_keys:
        trials.off["long_prompts"] = f"it is for 16 bits, {num_keys:,} tokens or more, and keys as wide as values"
        return None
    slower: list[str] = []

    def problem(attend: Callable[..., torch.Tensor]) -> Difference | None:
        by_library = partial(triton_attention, long_prompts=LongPrompts(attend, 2, 0))
        found = attention_problem(spec, weights, by_library, block_size)
        if found is None:
            ways: tuple[Backend, ...] = triton_attention, by_library
            ours, theirs = (
                _layer_seconds(spec, weights.most_heads, way, num_keys, block_size, seconds) for way in ways
            )
            slower.extend([f"it took {theirs:.2g} s, Triton's kernels {ours:.2g} s"] * (theirs >= ours))
        return found

    attend = trials.tried("long_prompts", find, problem)
    if attend is not None and not slower:
        return LongPrompts(attend)
    if slower:
        trials.off["long_prompts"] = slower[0]
    if attention.current_flash_attention_impl():
        attention.restore_flash_attention_impl()
    return None


def _layer_seconds(
    spec: ModelSpec, heads: int, way: Backend, num_keys: int, block_size: int, seconds: Seconds
) -> float:
    """Return the time of the first layer's attention for the end of a prompt."""
    shape = next(iter(spec.kv_shapes.values()))
    num_blocks = -(-num_keys // block_size)
    cache = new_cache(shape, spec.dtype, spec.device, num_blocks=num_blocks, block_size=block_size)
    sizes = (heads, shape.key_dim), (shape.kv_heads, shape.key_dim), (shape.kv_heads, shape.value_dim)
    query, key, value = (torch.zeros(NUM_TOKENS, *size, dtype=spec.dtype, device=spec.device) for size in sizes)
    step = prompt(num_keys, spec.vocab_size, block_size, start=num_keys - NUM_TOKENS)
    batch = build_batch(step, block_size, spec.device)
    return seconds(lambda: way(batch)(query, key, value, cache, Scoring(1.0)))
