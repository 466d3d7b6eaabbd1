"""Computes projections of the same input as one matrix product on a GPU: query, key and value, and gate and up.

One product of a wide matrix takes less time than several of narrow ones, and fewer launches. The modules stay: the
first one called computes the product of all, and each returns its own columns. Their weights are slices of one matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module
from torch.nn.functional import linear

from oaiserve.engine.model.gpu.device_matrices import PackedLinear, PackedMatrix, joined

# The names of modules that get the same input, once in each forward, in this order.
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Product:
    """The product of a group: its slices exist from the call of the first module to that of the last."""

    def __init__(self, modules: list[Linear], matrix: PackedMatrix | None) -> None:
        self.sizes = [module.out_features for module in modules]
        self._first = modules[0]
        self.matrix = matrix  # of all, if these are packed
        self.weight = None if matrix is not None else _together([module.weight for module in modules])
        biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
        self.bias = _together(biases) if biases else None
        self.parts: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor) -> Tensor:
        """Return the products of all modules of the group, side by side."""
        if self.matrix is None:
            assert self.weight is not None
            return linear(x, self.weight, self.bias)
        assert isinstance(self._first, PackedLinear)
        return self._first.multiply(x, self.matrix, self.bias)


class _Projection(Linear):
    """A module of a group. Layers share compiled code, so their differences are in attributes."""

    product: Product
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return _part(self.product, self.index, input)


class _PackedProjection(PackedLinear):
    """The same, whose matrix is packed."""

    product: Product
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return _part(self.product, self.index, input)


def _part(product: Product, index: int, x: Tensor) -> Tensor:
    if index == 0:
        product.parts = product(x).split(product.sizes, dim=-1)
    part = product.parts[index]
    if index == len(product.sizes) - 1:
        product.parts = ()
    return part


def _fused_matrix(group: list[Linear]) -> PackedMatrix | None:
    """Return one matrix for all modules of a group, whose own become slices of it, or None if it is impossible."""
    modules = [module for module in group if isinstance(module, PackedLinear)]
    matrix = joined([module.matrix for module in modules]) if len(modules) == len(group) else None
    begin = 0
    for module in modules if matrix is not None else ():
        assert matrix is not None
        module.matrix, begin = matrix.rows(begin, begin + module.out_features), begin + module.out_features
    return matrix


_FUSED: dict[type[Linear], type[Linear]] = {Linear: _Projection, PackedLinear: _PackedProjection}


@torch.no_grad()
def fuse_projections(model: Module) -> int:
    """Fuse the groups of a model where possible, and return their number."""
    number = 0
    for module in list(model.modules()):
        for names in GROUPS:
            parts = [getattr(module, name, None) for name in names]
            group: list[Any] = [part for part in parts if type(part) in _FUSED]
            if (
                len({type(part) for part in group}) > 1
                or len(group) < len(names)
                or len({(part.in_features, part.bias is None) for part in group}) > 1
            ):
                continue
            kind, matrix = type(group[0]), _fused_matrix(group)
            if kind is PackedLinear and matrix is None:
                continue
            product = Product(group, matrix)
            for index, part in enumerate(group):
                part.__class__ = _FUSED[kind]
                part.product, part.index = product, index
            number += 1
    return number


def product_of(modules: list[Module]) -> Product | None:
    """Return the product of these modules if they are a whole group."""
    first = modules[0]
    if not isinstance(first, _Projection | _PackedProjection) or len(first.product.sizes) != len(modules):
        return None
    is_group = all(
        isinstance(module, _Projection | _PackedProjection)
        and module.product is first.product
        and module.index == index
        for index, module in enumerate(modules)
    )
    return first.product if is_group else None


def separate_projections(model: Module) -> None:
    """Undo `fuse_projections`: each module computes its own product again, from its slice of the matrix."""
    for module in model.modules():
        for plain, fused in _FUSED.items():
            if type(module) is fused:
                del module.product, module.index
                module.__class__ = plain


def _together(parameters: list[Tensor]) -> Tensor:
    """Join tensors into one, whose slices they become."""
    tensor = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, tensor.split([len(one) for one in parameters]), strict=True):
        parameter.data = part  # the memory of the old one is free
    return tensor
