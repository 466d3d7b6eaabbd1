"""`Started` holds a model that is ready to run steps, for the engine, however it was started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.memory import longest_request
from oaiserve.engine.model.profiler import TorchProfiler, TorchRanges
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.model.states import States

if TYPE_CHECKING:
    from oaiserve.engine.drafting.draft_model import DraftModel
    from oaiserve.engine.model.parallel.workers import Workers
    from oaiserve.engine.start.draft import DraftWeights

# A step of so many tokens keeps the device busy. In a longer step, decodes would only wait longer for prefills.
CPU_STEP_TOKENS = 512
GPU_STEP_TOKENS = 2048


class Started(NamedTuple):
    """All that the engine needs of a model that is ready to run steps."""

    spec: ModelSpec
    runner: ModelRunner
    num_blocks: int
    max_model_len: int  # in tokens: the model's, or what the KV cache holds if that is less
    max_step_tokens_default: int
    profiler: TorchProfiler
    ranges: TorchRanges | None = None  # None: phases of steps are not marked for NVTX
    # Rows and columns of the linear layers that adapters may name, by the names of their modules.
    adaptable: Mapping[str, tuple[int, int]] = MappingProxyType({})
    draft: DraftModel | None = None
    num_states: int = 0  # of sequences; 0 if no layer keeps one
    warm_up: Callable[[], None] = lambda: None  # to be called by the thread that runs the steps, before the first one
    features: Mapping[str, bool] = MappingProxyType({})  # of `fast_paths`, which are on; empty on a CPU
    workers: Workers | None = None  # of a tensor-parallel model


def started_on_cpu(
    executor: Executor,
    spec: ModelSpec,
    options: EngineOptions,
    adaptable: Mapping[str, tuple[int, int]],
    *,
    num_blocks: int,
    num_states: int,
    draft: DraftWeights | None = None,
) -> Started:
    """Make the runner of a model on a CPU, and that of its draft model."""
    device = torch.device("cpu")
    states = States(spec.state_shapes, num_states, device) if num_states else None
    return Started(
        spec,
        ModelRunner(executor, device, options.block_size, states=states),
        num_blocks,
        longest_request(spec, num_blocks * options.block_size),
        CPU_STEP_TOKENS,
        TorchProfiler(device),
        adaptable=adaptable if options.has_adapters else {},
        draft=None if draft is None else draft.start(options, num_blocks=num_blocks, vocab_size=spec.vocab_size),
        num_states=num_states,
    )
