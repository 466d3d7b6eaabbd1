"""Products with the matrices of experts by Triton kernels, after a plan of which rows each expert has."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from oaiserve.engine.model.gpu.device_experts import ExpertMatrices
from oaiserve.engine.model.gpu.triton_expert_kernels import expert_kernel, plan_experts_kernel
from oaiserve.engine.model.gpu.triton_matrices import MatrixTiles, counters, num_splits, tiles_for

PAIRS_AT_A_TIME = 1024
LARGEST = MatrixTiles(64, 128, num_warps=8, num_stages=3)  # with more rows, each at a place of its own, it spills


class Plan(NamedTuple):
    """Which rows each expert has, in tiles. All of it is on the device."""

    order: Tensor
    tile_expert: Tensor
    tile_first: Tensor
    tile_end: Tensor
    tiles: MatrixTiles


def planned(chosen: Tensor, num_experts: int) -> Plan:
    """Sort the rows by expert. The host knows only how many tiles there can be."""
    num_pairs = chosen.numel()
    tiles = tiles_for(-(-num_pairs // num_experts))
    tiles = tiles if tiles.rows < LARGEST.rows else LARGEST
    most_tiles = min(num_pairs, num_pairs // tiles.rows + num_experts)
    order, tile_expert, tile_first, tile_end = torch.empty(
        num_pairs + 3 * most_tiles, dtype=torch.int32, device=chosen.device
    ).split([num_pairs, most_tiles, most_tiles, most_tiles])
    plan_experts_kernel[(num_experts,)](
        *(chosen.contiguous(), order, tile_expert, tile_first, tile_end, num_pairs, most_tiles),
        NUM_EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        TILE_ROWS=tiles.rows,
        CHUNK=min(PAIRS_AT_A_TIME, max(32, triton.next_power_of_2(num_pairs))),
        num_warps=4,
    )
    return Plan(order, tile_expert, tile_first, tile_end, tiles)


def product(x: Tensor, matrices: ExpertMatrices, plan: Plan, *, pairs_of_row: int, factors: Tensor | None) -> Tensor:
    """Return the products [pairs, n] of rows with the matrices of their experts, in the order of the pairs.

    They are multiplied by `factors` [pairs], if there are any.
    """
    (n, columns), tile = matrices.shape, matrices.tile_columns
    tiles, out = plan.tiles, x.new_empty(len(plan.order), n)
    grid, num_tiles = (-(-n // tiles.n), len(plan.tile_expert)), columns // tile
    splits = num_splits(grid[0] * grid[1], num_tiles, x.device)
    partial = torch.empty(splits, *out.shape, dtype=torch.float32, device=x.device) if splits > 1 else out
    zeros = matrices.scales if matrices.zeros is None else matrices.zeros  # a missing tensor is not read
    tensors = x, matrices.codes, matrices.scales, zeros, out if matrices.bias is None else matrices.bias
    strides = x.stride(0), *matrices.codes.stride()[:2], *matrices.scales.stride()[:2]
    expert_kernel[(*grid, splits)](
        *tensors,
        out if factors is None else factors.contiguous(),
        *(plan.order, plan.tile_expert, plan.tile_first, plan.tile_end),
        out,
        partial,
        counters(x.device),
        *(len(plan.order), n, columns, -(-num_tiles // splits), matrices.group_columns, pairs_of_row),
        *strides,
        KIND=matrices.kind,
        HAS_ZEROS=matrices.zeros is not None,
        HAS_BIAS=matrices.bias is not None,
        HAS_FACTORS=factors is not None,
        SPLITS=splits,
        TILE_COLUMNS=tile,
        **tiles.constants(),
    )
    return out
