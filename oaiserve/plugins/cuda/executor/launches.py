"""Helpers for the launches of several Triton kernels."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

# A product and the sum it is added to are rounded only once, as in every comparison. Triton 3.10 has another default.
triton.knobs.language.default_fp_fusion = True


def present(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """Return a kernel's argument. A missing tensor is replaced by another one, which the kernel doesn't read."""
    if tensor is None:
        return unread
    return tensor


def with_heads_in_one_piece(numbers: Tensor) -> Tensor:
    """Return numbers [..., heads, dim] such that each token's numbers are adjacent, as kernels expect them."""
    if numbers.stride()[-2:] == (numbers.shape[-1], 1):
        return numbers
    return numbers.contiguous()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
