"""Computes projections of the same input as one matrix product on a GPU: query, key and value, and gate and up.

One product of a wide matrix takes less time than several of narrow ones, and fewer launches. The modules stay: the
first one that is called computes the product of all, and each returns its own columns. Their weights are parts of one
matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear

# The names of modules that get the same input, once in each forward, in this order.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Product:
    """The product of a group, whose parts are there from the call of its first module to that of its last."""

    def __init__(self, modules: list[Linear]) -> None:
        self.sizes = [module.out_features for module in modules]
        self.weight = _together([module.weight for module in modules])
        biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
        self.bias = _together(biases) if biases else None
        self.parts: tuple[Tensor, ...] = ()


class _Projection(Linear):
    """A module of a group. Layers share compiled code, so what differs between them is in attributes."""

    product: _Product
    index: int

    def forward(self, input: Tensor) -> Tensor:
        product = self.product
        if self.index == 0:
            product.parts = linear(input, product.weight, product.bias).split(product.sizes, dim=-1)
        part = product.parts[self.index]
        if self.index == len(product.sizes) - 1:
            product.parts = ()
        return part


@torch.no_grad()
def fuse_projections(model: Module) -> int:
    """Fuse the groups of a model that can be, and return how many these are."""
    number = 0
    for module in list(model.modules()):
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            group = [part for part in parts if type(part) is Linear]
            if len(group) < len(names) or len({(part.in_features, part.bias is None) for part in group}) > 1:
                continue
            product = _Product(group)
            for index, part in enumerate(group):
                part.__class__ = _Projection
                part.product, part.index = product, index  # type: ignore[assignment]
            number += 1
    return number


def separate_projections(model: Module) -> None:
    """Undo `fuse_projections`: each module computes its own product again, from its part of the matrix."""
    for module in model.modules():
        if isinstance(module, _Projection):
            del module.product, module.index
            module.__class__ = Linear  # type: ignore[assignment]


def _together(parameters: list[Tensor]) -> Tensor:
    """Return a tensor of all, parts of which they become."""
    tensor = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, tensor.split([len(one) for one in parameters]), strict=True):
        parameter.data = part  # the memory of the old one is free
    return tensor
