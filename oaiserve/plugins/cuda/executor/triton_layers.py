"""The operations of `layer_operations` as Triton kernels, each in one launch."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from oaiserve.engine.decoder.description import Norm
from oaiserve.plugins.cuda.executor.device_matrices import Rounded
from oaiserve.plugins.cuda.executor.launches import present
from oaiserve.plugins.cuda.executor.triton_layer_kernels import activate_kernel, add_and_norm_kernel

ACTIVATED_AT_A_TIME = 1024  # numbers that a program computes


def add_and_norm(
    hidden: Tensor,
    added: tuple[Tensor, ...],
    out_norm: Norm | None,
    norm: Norm | None,
    scale: float = 1.0,
    rounded: Rounded | None = None,
) -> tuple[Tensor, Tensor]:
    """Do the same as `layer_operations.add_and_norm`, with `hidden` changed in place.

    Sums are in float32. The norm is also written to `rounded`, if it is passed.
    """
    rows, width = hidden.shape
    out = hidden
    if norm is not None:
        out = torch.empty_like(hidden)
    first, second = (*added, hidden, hidden)[:2]
    tile, num_warps = _row_tile(width)
    written, rounded_group = _rounded_arguments(rounded, hidden, tile)
    out_weight, out_bias, out_epsilon, has_out_mean = _arguments(out_norm)
    weight, bias, epsilon, has_mean = _arguments(norm)
    add_and_norm_kernel[(rows,)](
        *(hidden, first, second, out),
        *(present(out_weight, hidden), present(out_bias, hidden), present(weight, hidden), present(bias, hidden)),
        *(out_epsilon, epsilon),
        *(scale, width, hidden.stride(0), first.stride(0), second.stride(0)),
        *written,
        ROUNDED_GROUP=rounded_group,
        NUM_ADDED=len(added),
        HAS_OUT_NORM=out_norm is not None,
        HAS_OUT_BIAS=out_bias is not None,
        HAS_OUT_MEAN=has_out_mean,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_MEAN=has_mean,
        TILE=tile,
        num_warps=num_warps,
    )
    return hidden, out


def activate(
    products: Tensor,
    activation: str,
    *,
    is_gated: bool,
    alpha: float = 0.0,
    limit: float = 0.0,
    rounded: Rounded | None = None,
) -> Tensor:
    """Do the same as `layer_operations.activate`, also for gpt-oss's "clamped" gates with `alpha` and `limit`.

    The result is also written to `rounded`, if it is passed and has groups.
    """
    rows, columns = products.shape
    inner = columns // (1 + is_gated)
    out = products.new_empty(rows, inner)
    written, rounded_group = _rounded_arguments(rounded, products, ACTIVATED_AT_A_TIME)
    activate_kernel[rows, -(-inner // ACTIVATED_AT_A_TIME)](
        *(products, out, inner, products.stride(0), alpha, limit),
        *written,
        ROUNDED_GROUP=rounded_group,
        ACTIVATION=activation,
        IS_GATED=is_gated,
        TILE=ACTIVATED_AT_A_TIME,
        num_warps=4,
    )
    return out


def _rounded_arguments(rounded: Rounded | None, unread: Tensor, tile: int) -> tuple[tuple[Tensor, Tensor, int], int]:
    """Return the codes and scales that a kernel writes with the number of scales of a group, and the columns of a tile
    that share a scale, or 0 if nothing is rounded."""
    if rounded is None:
        return (unread, unread, 0), 0
    return (rounded.codes, rounded.scales, len(rounded.codes)), rounded.group or tile


def _arguments(norm: Norm | None) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """Return a norm's weight, bias and epsilon, and whether it subtracts the mean."""
    if norm is None:
        return None, None, 0.0, False
    return norm.weight, norm.bias, norm.epsilon, norm.subtracts_mean


@functools.cache
def _row_tile(width: int) -> tuple[int, int]:
    """Return the size of a tile with a whole row, and the number of its warps."""
    tile = triton.next_power_of_2(width)
    return tile, min(16, max(1, tile // 256))
