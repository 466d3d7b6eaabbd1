"""The parts that launches of several Triton kernels share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def present(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """Return an argument of a kernel: the tensor or, if it is missing, another one, which the kernel doesn't read."""
    if tensor is None:
        return unread
    return tensor


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
