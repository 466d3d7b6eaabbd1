"""Between host and device without waiting: pinned memory, few copies, all in the order of the stream."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike


def on_device(values: ArrayLike | torch.Tensor, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Does not wait for what the device is computing, as `torch.tensor(values, device=device)` would."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        # torch keeps pinned memory until the copy has been made, and then takes it again for the next.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class ReadBack:
    """The way of some tensors to the host: float32, or integers that fit into 32 bits. They travel as one, behind all
    that the device has to do; nobody waits for them before `wait`."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.arrived: torch.cuda.Event | None = None
        if tensors[0].device.type == "cpu":
            return
        self._tensors = [t if t.dtype == torch.float32 else t.to(torch.int32) for t in tensors]
        packed = torch.cat([t.view(torch.int32).flatten() for t in self._tensors])
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
        words = self._packed.numpy()
        arrays, start = [], 0
        for tensor in self._tensors:
            array = words[start : start + tensor.numel()].reshape(tensor.shape)
            arrays.append(array.view(np.float32) if tensor.dtype == torch.float32 else array)
            start += tensor.numel()
        return arrays
