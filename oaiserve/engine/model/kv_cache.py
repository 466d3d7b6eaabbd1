"""Memory for the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Zeros, because attention multiplies what it masks by 0, and 0 times a NaN left in memory is NaN."""
    if device is not None and device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # NumPy asks the system for zeroed pages, which cost nothing until they are used; torch writes every byte, which
    # takes seconds for some GiB.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
