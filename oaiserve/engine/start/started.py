"""`Started` holds a model that is ready to run steps, for the engine, however it was started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from oaiserve.engine.model.profiler import NvtxRanges, TorchProfiler
from oaiserve.engine.model.runner import ModelRunner

# A step of so many tokens keeps the device busy. In a longer step, decodes would only wait longer for prefills.
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048


class Started(NamedTuple):
    """All that the engine needs of a model that is ready to run steps."""

    runner: ModelRunner
    num_blocks: int
    max_model_len: int  # in tokens: the model's, or what the KV cache holds if that is less
    max_step_tokens_default: int
    profiler: TorchProfiler
    ranges: NvtxRanges | None  # None: parts of steps are not marked for NVTX
    # Rows and columns of the linear layers that adapters may name, by the names of their modules.
    adaptable: Mapping[str, tuple[int, int]] = MappingProxyType({})
    draft: ModelRunner | None = None  # of the draft model
    num_states: int = 0  # of sequences; 0 if no layer keeps one
    warm_up: Callable[[], None] = lambda: None  # to be called by the thread that runs the steps, before the first one
    features: Mapping[str, bool] = MappingProxyType({})  # of `fast_paths`, which are on; empty on a CPU
