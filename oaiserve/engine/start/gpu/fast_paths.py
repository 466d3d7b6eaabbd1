"""Finds out when a model starts on a GPU which faster ways to compute it are used.

Each of them is optional: it is tried on the device, and compared with a plain way in torch. One that fails, or computes
something else, is switched off, and the log says so; the start goes on.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.spec import ModelSpec
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.kernels import Kernels, PlainAttention
from oaiserve.engine.executors.cuda.select import select_backend
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.start.gpu.kernels import attention_problem, logits_problem, sampling_problem
from oaiserve.engine.start.gpu.long_prompts import long_prompts_checked
from oaiserve.engine.start.gpu.products import experts_checked, multiply_checked, unpacking_where_faster
from oaiserve.engine.start.gpu.trials import FEATURES, Trials


class FastPaths(NamedTuple):
    """The fast paths by which a GPU computes a model."""

    kernels: Kernels = Kernels()
    sample_ids: SampleIds | None = None  # None: in plain torch
    apply_masks: ApplyMasks | None = None

    @property
    def have_graphs(self) -> bool:
        """Decide whether steps can be captured as CUDA graphs, which needs kernels for attention and for sampling."""
        return self.sample_ids is not None and self.kernels.attention is not PlainAttention


def no_fast_paths(reason: str, trials: Trials) -> FastPaths:
    """Switch all fast paths off, for a reason."""
    trials.off |= dict.fromkeys(FEATURES, reason)
    return FastPaths()


def find_fast_paths(spec: ModelSpec, weights: CudaWeights, options: EngineOptions, trials: Trials) -> FastPaths:
    """Try all fast paths."""
    attention = _attention(spec, weights, options, trials)
    sample_ids, apply_masks = _sampling_checked(spec, trials)

    def of_packed() -> Any:
        return unpacking_where_faster(weights.packed, spec.dtype, _kernels("triton_products").multiply)

    kernels = Kernels(attention)
    if (multiply := multiply_checked(weights.packed, spec.dtype, of_packed, trials)) is not None:
        kernels = kernels._replace(multiply=multiply)
    experts = experts_checked(weights.packed, spec.dtype, lambda: _kernels("triton_products"), trials)
    kernels = kernels._replace(experts=experts)
    if attention is PlainAttention:
        trials.off["fused_layers"] = "attention is in plain torch"
    else:
        kernels = (
            trials.tried(
                "fused_layers",
                lambda: kernels._replace(
                    operations=_kernels("triton_layers"), recurrence=_kernels("triton_states").recurrence
                ),
                lambda fused: logits_problem(spec, weights, fused, options.block_size),
            )
            or kernels
        )
    if attention is PlainAttention:
        trials.off["long_prompts"] = "attention is in plain torch"
        return FastPaths(kernels, sample_ids, apply_masks)
    triton_attention: Any = attention
    library = long_prompts_checked(spec, weights, triton_attention, options.block_size, trials)
    if library is not None:
        kernels = kernels._replace(attention=partial(triton_attention, library=library))
    return FastPaths(kernels, sample_ids, apply_masks)


def _attention(spec: ModelSpec, weights: CudaWeights, options: EngineOptions, trials: Trials) -> Backend:
    """Return the backend: kernels, unless they differ."""
    backend = select_backend(spec.device, options.attention)
    if backend is PlainAttention:
        trials.off["attention"] = "attention is in plain torch, without triton"
        return backend

    def problem() -> object | None:
        found = attention_problem(spec, weights, backend, options.block_size)
        # Norms and rotation are in kernels of attention only in whole layers.
        return found or logits_problem(spec, weights, Kernels(backend), options.block_size)

    return backend if trials.is_usable("attention", problem) else PlainAttention


def _sampling_checked(spec: ModelSpec, trials: Trials) -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample: kernels, unless they differ; None for both without Triton."""

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
    """Return the functions that sample with Triton kernels, or None for both where there is no Triton."""
    if find_spec("triton") is None:
        return None, None
    from oaiserve.engine.model.sampling import triton_sampling

    return triton_sampling.sample_ids, triton_sampling.apply_masks


def _kernels(module: str) -> Any:
    """Import a module of kernels. Raises ImportError without Triton."""
    return import_module(f"oaiserve.engine.model.gpu.{module}")
