"""Finds out when a model starts on a GPU which faster ways to compute it are used.

Each of them is optional: it is tried on the device, and compared with a plain way in torch. One that fails, or computes
something else, is switched off, and the log says so; the start goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, get_args

from oaiserve.config import EngineOptions
from oaiserve.engine.model.attention import Backend
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.select import select_backend
from oaiserve.engine.model.gpu.fused_layers import FusedLayers
from oaiserve.engine.model.sampling.draw_rows import SampleIds
from oaiserve.engine.model.sampling.logit_edits import ApplyMasks
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu.kernels import attention_problem, sampling_problem
from oaiserve.engine.start.gpu.layers import fuse_layers
from oaiserve.engine.start.gpu.products import compute_experts_checked, multiply_checked
from oaiserve.engine.start.gpu.usable import is_usable

# The names under which /metrics says what is on.
Feature = Literal[
    "attention",
    "sampling",
    "packed_weights",
    "packed_experts",
    "fused_layers",
    "adapters",
    "decode_graphs",
    "prompt_graphs",
]
FEATURES: tuple[Feature, ...] = get_args(Feature)


class FastPaths(NamedTuple):
    """The fast paths by which a GPU computes a model."""

    backend: Backend
    sample_ids: SampleIds | None  # None: in plain torch
    apply_masks: ApplyMasks | None
    layers: FusedLayers | None  # None: they run in transformers' code
    features: Mapping[Feature, bool]  # what has been tried

    @property
    def have_graphs(self) -> bool:
        """Decide whether steps can be captured as CUDA graphs, which needs kernels for attention and for sampling."""
        return self.sample_ids is not None and self.backend is not ReferenceAttention


def find_fast_paths(loaded: LoadedModel, options: EngineOptions) -> FastPaths:
    """Try all fast paths."""
    backend, sample_ids, apply_masks = _attention_and_sampling(loaded, options)
    is_packed = multiply_checked(loaded, lambda: _kernels("triton_matrices").multiply)
    has_experts = compute_experts_checked(loaded, lambda: _kernels("triton_experts").compute)
    features: dict[Feature, bool] = {
        "attention": backend is not ReferenceAttention,
        "sampling": sample_ids is not None,
        "packed_weights": is_packed,
        "packed_experts": has_experts,
    }
    may_fuse = options.compile and not options.has_adapters and not loaded.state_shapes
    fuses = may_fuse and backend is not ReferenceAttention
    layers = fuse_layers(loaded, options.block_size) if fuses else None
    return FastPaths(backend, sample_ids, apply_masks, layers, features)


def _attention_and_sampling(
    loaded: LoadedModel, options: EngineOptions
) -> tuple[Backend, SampleIds | None, ApplyMasks | None]:
    """Return the backend and the functions that sample: kernels, unless they differ."""

    def of_attention() -> object | None:
        return attention_problem(loaded, select_backend(loaded.device, options.attention), options.block_size)

    def of_sampling() -> str | None:
        sample_ids, apply_masks = _sampling()
        return None if sample_ids is None or apply_masks is None else sampling_problem(loaded, sample_ids, apply_masks)

    instead = "plain torch computes it, which is much slower and has no CUDA graphs"
    attends = is_usable("Attention by Triton's kernels", instead, of_attention)
    samples = is_usable("Sampling by Triton's kernels", instead, of_sampling)
    backend = select_backend(loaded.device, options.attention) if attends else ReferenceAttention
    return backend, *(_sampling() if samples else (None, None))


def _sampling() -> tuple[SampleIds | None, ApplyMasks | None]:
    """Return the functions that sample with Triton kernels, or None for both where there is no Triton."""
    if find_spec("triton") is None:
        return None, None
    from oaiserve.engine.model.sampling import triton_sampling

    return triton_sampling.sample_ids, triton_sampling.apply_masks


def _kernels(module: str) -> Any:
    """Import a module of kernels. Raises ImportError without Triton."""
    return import_module(f"oaiserve.engine.model.gpu.{module}")
