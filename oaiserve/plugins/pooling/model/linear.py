"""Computes linear layers on a CPU with oneDNN, whose weights are packed once.

torch's own layers call MKL in float32, which doesn't use the widest instructions of every CPU, and pack weights again
in each call.
"""

from __future__ import annotations

import logging

import torch

log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16)


class OneDnnLinear(torch.nn.Module):
    """A linear layer with its weight in oneDNN's own layout."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(states, self._weight, self._bias, "none", [], "")
        return product


@torch.inference_mode()
def pack_linears(model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace the linear layers of a model on a CPU, where torch has oneDNN. Other models stay as they are."""
    if device.type != "cpu" or dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return
    try:
        OneDnnLinear(torch.nn.Linear(16, 16, dtype=dtype))(torch.zeros(1, 2, 16, dtype=dtype))
    except (AttributeError, RuntimeError, TypeError) as error:  # These functions of torch are private.
        log.debug("Linear layers are torch's own: %s", error)
        return
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, OneDnnLinear(child))
