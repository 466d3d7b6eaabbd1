"""Decides which faster ways to compute a model are used when it starts on a GPU.

Each way is optional. It is tried on the device, and its results are compared with those of plain torch. A way that
fails or differs is switched off, with a line in the log, and the start continues.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels, PlainAttention, triton_kernels
from oaiserve.engine.executors.cuda.select import select_backend
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.start.gpu.kernels import logits_problem, sampling_problem
from oaiserve.engine.start.gpu.long_prompts import long_prompts_checked
from oaiserve.engine.start.gpu.products import unpacking_where_faster
from oaiserve.engine.start.gpu.trials import FEATURES, Trials


class FastPaths(NamedTuple):
    """The fast paths with which a GPU computes a model."""

    kernels: Kernels = Kernels()
    sample_ids: SampleIds | None = None  # If None, plain torch samples.
    apply_masks: ApplyMasks | None = None

    @property
    def have_graphs(self) -> bool:
        """Decide whether steps can be captured as CUDA graphs, which needs kernels for attention and for sampling."""
        return self.sample_ids is not None and self.kernels.attention is not PlainAttention


def no_fast_paths(reason: str, trials: Trials) -> FastPaths:
    """Switch all fast paths off for a reason."""
    trials.off |= dict.fromkeys(FEATURES, reason)
    return FastPaths()


def find_fast_paths(spec: ModelSpec, weights: CudaWeights, options: EngineOptions, trials: Trials) -> FastPaths:
    """Try all fast paths."""
    sample_ids, apply_masks = _sampling_checked(spec, trials)
    attention = select_backend(spec.device, options.attention)
    kernels: Kernels | None = None
    if attention is PlainAttention:
        trials.off["kernels"] = "attention is in plain torch"
    else:
        kernels = trials.tried(
            "kernels",
            partial(_kernels, attention, weights, spec.dtype),
            lambda made: logits_problem(spec, weights, made, options.block_size),
        )
    if kernels is None:
        trials.off["long_prompts"] = "there are no other kernels"
        return FastPaths(Kernels(), sample_ids, apply_masks)
    triton_attention: Any = kernels.attention
    library = long_prompts_checked(spec, weights, kernels, options.block_size, trials)
    if library is not None:
        kernels = kernels._replace(attention=partial(triton_attention, library=library))
    return FastPaths(kernels, sample_ids, apply_masks)


def _kernels(attention: Backend, weights: CudaWeights, dtype: torch.dtype) -> Kernels:
    """Return all kernels. Raises ImportError without Triton."""
    kernels = triton_kernels()._replace(attention=attention)
    return kernels._replace(multiply=unpacking_where_faster(weights.packed, dtype, kernels.multiply))


def _sampling_checked(spec: ModelSpec, trials: Trials) -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample with kernels. Both are None if they differ from plain torch, or without
    Triton."""

    def problem() -> str | None:
        sample_ids, apply_masks = _sampling()
        return None if sample_ids is None or apply_masks is None else sampling_problem(spec, sample_ids, apply_masks)

    if not trials.is_usable("sampling", problem):
        return None, None
    found = _sampling()
    if found[0] is None:
        trials.off["sampling"] = "Triton is not installed"
    return found


def _sampling() -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample with Triton kernels. Both are None without Triton."""
    if find_spec("triton") is None:
        return None, None
    from oaiserve.engine.model.sampling import triton_sampling

    return triton_sampling.sample_ids, triton_sampling.apply_masks
