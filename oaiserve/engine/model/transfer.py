"""Between host and device without waiting: pinned memory, few copies, all in the order of the stream."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

# As bytes, tensors of any kind travel together; these are the kinds that do.
_NUMPY_TYPES = {torch.int64: np.int64, torch.float32: np.float32, torch.bool: np.bool_}


def on_device(values: ArrayLike | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Does not wait for what the device is computing, as `torch.tensor(values, device=device)` would."""
    return pinned(torch.as_tensor(values, dtype=dtype), device).to(device, non_blocking=True)


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor`, which is on the host, in memory that a CUDA device copies from while nobody waits. torch keeps it until
    the copy has been made, and then takes it again for the next."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


class ReadBack:
    """The way of some tensors of int64, float32 or bool to the host. They travel as one, behind all that the device has
    to do; nobody waits for them before `wait`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.arrived: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            return
        packed = pack(tensors)
        self._packed = packed.to("cpu", non_blocking=True)  # into pinned memory
        if packed.is_cuda:
            self.arrived = torch.cuda.Event(enable_timing=True)
            self.arrived.record()

    def wait(self) -> list[np.ndarray]:
        """The tensors, once they are here. This is where the host waits for the device."""
        if self._tensors[0].device.type == "cpu":
            return [tensor.numpy() for tensor in self._tensors]
        if self.arrived is not None:
            self.arrived.synchronize()
        return unpack(self._packed.numpy(), self._tensors)


def pack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All of them as one, in bytes."""
    parts = [tensor.flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def unpack(packed: np.ndarray, tensors: list[torch.Tensor]) -> list[np.ndarray]:
    """What `pack` was given, of the same shapes and types as `tensors`."""
    arrays: list[np.ndarray] = []
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        arrays.append(packed[start:end].view(_NUMPY_TYPES[tensor.dtype]).reshape(tensor.shape))
        start = end
    return arrays
