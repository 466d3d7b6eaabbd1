"""Copies tensors between host and device without waiting: from pinned memory, in few copies, in stream order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

# The dtypes that `pack` can concatenate as bytes.
_NUMPY_TYPES = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}


def on_device(values: ArrayLike | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return `values` like `torch.tensor(values, device=device)`, but without waiting for the device's work."""
    # Without a device, `as_tensor` would use the one of a surrounding `with torch.device(...)`.
    return pinned(torch.as_tensor(values, dtype=dtype, device="cpu"), device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy in pinned memory, from which CUDA copies asynchronously; on a CPU, the tensor itself.

    torch keeps the memory until the copy to the device has been made, and then reuses it.
    """
    return tensor.pin_memory() if device.type == "cuda" else tensor


class ReadBack:
    """Copies int64, float32 or bool tensors to the host in one copy, after all earlier work. Only `wait` waits."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.arrived: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            return
        packed = pack(tensors)
        self._packed = packed.to("cpu", non_blocking=True)  # This copies into pinned memory.
        if packed.is_cuda:
            self.arrived = torch.cuda.Event(enable_timing=True)
            self.arrived.record()

    def wait(self) -> list[np.ndarray]:
        """Wait until the tensors are on the host, and return them. This is where the host waits for the device."""
        if self._tensors[0].device.type == "cpu":
            return [tensor.numpy() for tensor in self._tensors]
        if self.arrived is not None:
            self.arrived.synchronize()
        return unpack(self._packed.numpy(), self._tensors)


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all tensors, concatenated."""
    # An empty tensor may have strides of 0, as those from NumPy 2.5 have, and then can't be viewed as bytes.
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    if not parts:
        return torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unpack(packed: np.ndarray, tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """Return the arrays in `packed`. They have the shapes and types of `tensors`."""
    arrays: list[np.ndarray] = []
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        arrays.append(packed[start:end].view(_NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape))
        start = end
    return arrays
