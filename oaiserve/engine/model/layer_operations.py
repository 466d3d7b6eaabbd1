"""The operations of a layer beside matrix products and attention, each in plain torch: norms with the sums before them,
and activations. `triton_layers` computes each in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


class RowNorm(NamedTuple):
    """A norm of rows."""

    weight: Tensor  # float32 [width]
    bias: Tensor | None  # float32 [width]
    epsilon: float
    subtracts_mean: bool


class LayerOperations(Protocol):
    """The operations, as this module and `triton_layers` have them."""

    def add_and_norm(
        self,
        hidden: Tensor,
        added: tuple[Tensor, ...],
        out_norm: RowNorm | None,
        norm: RowNorm | None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]: ...

    def activate(self, products: Tensor, activation: str, *, is_gated: bool) -> Tensor: ...


def add_and_norm(
    hidden: Tensor,  # [T, width]
    added: tuple[Tensor, ...],  # of the same shape, up to two
    out_norm: RowNorm | None,
    norm: RowNorm | None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return hidden + scale * out_norm(the sum of `added`), and its norm. Without a norm, both are the same.

    `hidden` may be overwritten.
    """
    if added:
        total = sum((one.float() for one in added[1:]), added[0].float())
        total = total if out_norm is None else normed(total, out_norm)
        hidden = (hidden.float() + scale * total).to(hidden.dtype)
    return hidden, hidden if norm is None else normed(hidden.float(), norm).to(hidden.dtype)


def activate(products: Tensor, activation: str, *, is_gated: bool) -> Tensor:
    """Return the activation of `products` [T, inner]; or, if they have gates and then ups, activation(gate) * up."""
    if not is_gated:
        return ACTIVATIONS[activation](products.float()).to(products.dtype)
    gate, up = products.float().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate) * up).to(products.dtype)


def normed(x: Tensor, norm: RowNorm) -> Tensor:
    """Return the norm of rows, float32."""
    if norm.subtracts_mean:
        return torch.nn.functional.layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.epsilon)
    normed = torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.epsilon)
    return normed if norm.bias is None else normed + norm.bias
