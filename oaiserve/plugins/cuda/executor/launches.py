"""The parts that launches of several Triton kernels share."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

# Products are added without a rounding between, as in every comparison. Triton 3.10 has another default.
triton.knobs.language.default_fp_fusion = True


def present(tensor: Tensor | None, unread: Tensor) -> Tensor:
    """Return an argument of a kernel: the tensor or, if it is missing, another one, which the kernel doesn't read."""
    if tensor is None:
        return unread
    return tensor


def with_heads_in_one_piece(numbers: Tensor) -> Tensor:
    """Return numbers [..., heads, dim] such that those of a token are adjacent, as kernels expect them."""
    if numbers.stride()[-2:] == (numbers.shape[-1], 1):
        return numbers
    return numbers.contiguous()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
