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
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.long_prompts import LongPrompts
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.gpu.fused_layers import FusedLayers
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.start.gpu.kernels import attention_problem, sampling_problem
from oaiserve.engine.start.gpu.layers import fuse_layers
from oaiserve.engine.start.gpu.long_prompts import long_prompts_checked
from oaiserve.engine.start.gpu.products import compute_experts_checked, multiply_checked, unpacking_where_faster
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.errors import StartupError


class FastPaths(NamedTuple):
    """The fast paths by which a GPU computes a model."""

    backend: Backend
    sample_ids: SampleIds | None  # None: in plain torch
    apply_masks: ApplyMasks | None
    layers: FusedLayers | None  # None: they run in transformers' code
    long_prompts: LongPrompts | None  # None: the backend computes all prompts alike

    @property
    def have_graphs(self) -> bool:
        """Decide whether steps can be captured as CUDA graphs, which needs kernels for attention and for sampling."""
        return self.sample_ids is not None and self.backend is not ReferenceAttention


def find_fast_paths(loaded: LoadedModel, options: EngineOptions, trials: Trials) -> FastPaths:
    """Try all fast paths."""
    backend, sample_ids, apply_masks = _attention_and_sampling(loaded, options, trials)
    multiply_checked(loaded, lambda: unpacking_where_faster(loaded, _kernels("triton_matrices").multiply), trials)
    compute_experts_checked(loaded, lambda: _kernels("triton_experts").compute, trials)
    layers: FusedLayers | None = None
    long_prompts: LongPrompts | None = None
    if backend is ReferenceAttention or options.exact:
        trials.off["long_prompts"] = "attention is in plain torch, or exact"
    else:
        triton_attention: Any = backend
        long_prompts = long_prompts_checked(loaded, triton_attention, options.block_size, trials)
        backend = partial(triton_attention, long_prompts=long_prompts) if long_prompts is not None else backend
    if reason := _reason_not_to_fuse(loaded, options, backend):
        trials.off["fused_layers"] = reason
    else:
        layers = fuse_layers(loaded, options, trials)
    return FastPaths(backend, sample_ids, apply_masks, layers, long_prompts)


def _reason_not_to_fuse(loaded: LoadedModel, options: EngineOptions, backend: Backend) -> str:
    """Return why the layers are not tried as fused ones; empty if they are."""
    if loaded.state_shapes:
        return "some of the model's layers keep a state"
    if not options.compile:
        return "--no-compile"
    if options.has_adapters:
        return "steps may have adapters"
    return "attention is in plain torch" if backend is ReferenceAttention else ""


def _attention_and_sampling(
    loaded: LoadedModel, options: EngineOptions, trials: Trials
) -> tuple[Backend, SampleIds | None, ApplyMasks | None]:
    """Return the backend and the functions that sample: kernels, unless they differ."""

    def of_attention() -> object | None:
        return attention_problem(loaded, _backend(loaded, options), options.block_size)

    def of_sampling() -> str | None:
        sample_ids, apply_masks = _sampling()
        return None if sample_ids is None or apply_masks is None else sampling_problem(loaded, sample_ids, apply_masks)

    attends = trials.is_usable("attention", of_attention)
    samples = trials.is_usable("sampling", of_sampling)
    backend = _backend(loaded, options) if attends else ReferenceAttention
    if attends and backend is ReferenceAttention:
        trials.off["attention"] = "attention is in plain torch (--attention)"
    if samples and _sampling()[0] is None:
        trials.off["sampling"] = "Triton is not installed"
    return backend, *(_sampling() if samples else (None, None))


def _backend(loaded: LoadedModel, options: EngineOptions) -> Backend:
    backend = select_backend(loaded.device, options.attention)
    if not options.exact:
        return backend
    if backend is ReferenceAttention:
        raise StartupError("--exact needs the package triton, and --attention triton.")
    from oaiserve.engine.model.attention.triton import ExactAttention

    return ExactAttention


def _sampling() -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample with Triton kernels, or None for both where there is no Triton."""
    if find_spec("triton") is None:
        return None, None
    from oaiserve.engine.model.sampling import triton_sampling

    return triton_sampling.sample_ids, triton_sampling.apply_masks


def _kernels(module: str) -> Any:
    """Import a module of kernels. Raises ImportError without Triton."""
    return import_module(f"oaiserve.engine.model.gpu.{module}")
