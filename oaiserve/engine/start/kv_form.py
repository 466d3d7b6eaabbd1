"""Chooses the form of the KV cache that a model's native step keeps."""

from __future__ import annotations

from typing import Any

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.kv_layout import latent_dim
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.errors import StartupError


def with_native_cache(loaded: LoadedModel, options: EngineOptions) -> LoadedModel:
    """Return the model with the form of KV cache that the options have its native step keep.

    Raises StartupError if they ask for eight bits where there is another form, or for a form of another device.
    """
    if options.kv_cache_dtype == "fp8" and loaded.device.type == "cpu":
        raise StartupError(f"--kv-cache-dtype fp8 is for --device cuda; '{loaded.name}' is on the CPU. Take int8.")
    is_native = loaded.device.type == "cpu" and options.compile
    numbers = _latent_dim(loaded) if is_native else 0
    if numbers == 0:
        return loaded.with_cache(options.kv_cache_dtype)
    if options.kv_cache_dtype != "auto":
        raise StartupError(
            f"--kv-cache-dtype {options.kv_cache_dtype} is for keys and values, in place of which the KV cache of "
            f"'{loaded.name}' has latent vectors, of {numbers} numbers for a token and layer."
        )
    return loaded.with_latent_cache(numbers)


def _latent_dim(loaded: LoadedModel) -> int:
    config: Any = loaded.model.config
    rank, shared = (getattr(config, name, None) or 0 for name in ("kv_lora_rank", "qk_rope_head_dim"))
    widths = {latent_dim(rank, shared, shape) for shape in loaded.kv_shapes.values()}
    return min(widths, default=0)
