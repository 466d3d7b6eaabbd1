"""Selects the attention backend, by name or as the fastest for the device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from oaiserve.config import Attention
from oaiserve.engine.executors.cuda.kernels import PlainAttention
from oaiserve.engine.model.attention import Backend
from oaiserve.errors import StartupError


def select_backend(device: torch.device, name: Attention = "auto") -> Backend:
    """Return this backend, or the fastest on the device. Raises StartupError if the device or a package lacks it."""
    has_triton = find_spec("triton") is not None
    if name == "auto":
        name = "triton" if device.type == "cuda" and has_triton else "reference"
    if name == "reference":
        return PlainAttention
    if device.type != "cuda":
        raise StartupError(f"Attention by {name} is for NVIDIA GPUs; the model is on {device}.")
    if not has_triton:
        raise StartupError(f"Attention by {name} needs the package triton. Install it.")
    from oaiserve.engine.model.attention.triton import TritonAttention

    return TritonAttention
