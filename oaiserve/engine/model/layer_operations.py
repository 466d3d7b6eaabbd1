"""The operations of a layer other than matrix products and attention, in plain torch: norms with the sums before them,
and activations. `triton_layers` computes each in one kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import Norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


def add_and_norm(
    hidden: Tensor,  # [T, width]
    added: tuple[Tensor, ...],  # at most two tensors, [T, width] each
    out_norm: Norm | None,
    norm: Norm | None,
    scale: float = 1.0,
    rounded: None = None,  # Only kernels also write the rounded norm.
) -> tuple[Tensor, Tensor]:
    """Return hidden + scale * out_norm(the sum of `added`), possibly in place, and its norm, if there is one."""
    if added:
        total = sum((one.float() for one in added[1:]), added[0].float())
        total = total if out_norm is None else out_norm(total)
        hidden = (hidden.float() + scale * total).to(hidden.dtype)
    return hidden, hidden if norm is None else norm(hidden.float()).to(hidden.dtype)


def activate(products: Tensor, activation: str, *, is_gated: bool, rounded: None = None) -> Tensor:
    """Return the activation of `products` [T, inner]; or, if they have gates and then ups, activation(gate) * up."""
    if not is_gated:
        return ACTIVATIONS[activation](products.float()).to(products.dtype)
    gate, up = products.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(products.dtype)
