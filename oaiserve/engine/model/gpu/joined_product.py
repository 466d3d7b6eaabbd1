"""Computes linear layers with the same input as one matrix product on a GPU: query, key and value, and gate and up.

One product of a wide matrix takes less time than several of narrow ones, and fewer launches. The modules stay as they
are, but for their weights, which become slices of one matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from oaiserve.engine.model.gpu.device_matrices import PackedLinear, joined

Product = Callable[[Tensor], Tensor]  # [T, columns] to [T, rows]
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # as torch.nn.functional.linear


@torch.no_grad()
def joined_product(modules: list[Module], multiply: Multiply) -> Product | None:
    """Return the product with the rows of all these modules, side by side, or None if their matrices cannot be one."""
    parts: list[Any] = modules
    kinds = {type(part) for part in parts}
    if kinds not in ({Linear}, {PackedLinear}) or len({(one.in_features, one.bias is None) for one in parts}) > 1:
        return None
    matrix = joined([part.matrix for part in parts]) if kinds == {PackedLinear} else None
    if kinds == {PackedLinear} and matrix is None:
        return None
    first, bias = parts[0], None if parts[0].bias is None else _together([part.bias for part in parts])
    if matrix is None:
        weight = _together([part.weight for part in parts])
        return lambda x: multiply(x, weight, bias)
    begin = 0
    for part in parts:
        part.matrix, begin = matrix.rows(begin, begin + part.out_features), begin + part.out_features
    return lambda x: first.multiply(x, matrix, bias)


def _together(parameters: list[Tensor]) -> Tensor:
    """Join tensors into one, whose slices they become."""
    tensor = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, tensor.split([len(one) for one in parameters]), strict=True):
        parameter.data = part  # the memory of the old one is free
    return tensor
