"""Computes modules of a model in float32, whatever its dtype is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

_HALVES = (torch.bfloat16, torch.float16)


class InFloat32:
    """A module whose parameters and buffers are in float32 until `restore`; without `recurse`, only its own."""

    def __init__(self, module: Module, *, recurse: bool = True) -> None:
        self.module = module
        tensors = (*module.parameters(recurse=recurse), *module.buffers(recurse=recurse))
        self._originals = [(tensor, tensor.data) for tensor in tensors if tensor.dtype in _HALVES]
        for tensor, original in self._originals:
            tensor.data = original.float()

    def restore(self) -> torch.dtype:
        """Restore the parameters, and return the dtype that the module had."""
        for tensor, original in self._originals:
            tensor.data = original
        if self._originals:
            return self._originals[0][1].dtype
        return torch.float32


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return the floating-point tensors of a module's arguments, or of its outputs, in a dtype."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            return value.to(dtype)
        return value
    if type(value) in (tuple, list):
        return type(value)(cast(one, dtype) for one in value)
    if type(value) is dict:
        return {name: cast(one, dtype) for name, one in value.items()}
    return value
