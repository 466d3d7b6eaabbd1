"""Times products with packed matrices in several ways on this device, and chooses the fastest for each number of rows.
A probe does so in its process, because the device may fail in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from msgspec.structs import replace
from torch import Tensor

from oaiserve.engine.executors.cuda.device_matrices import (
    ExpertMatrices,
    PackedMatrix,
    expanded_product,
    rounded_product,
)
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.product_ways import PROGRAMS_PER_SM, MatrixTiles, ProductWays
from oaiserve.engine.start.compare import Difference, difference
from oaiserve.engine.start.gpu.features import Probed
from oaiserve.engine.start.gpu.trials import Seconds, reason, seconds_on_device, unless_slower

KERNEL = ProductWays(unpacked_from=None)
UNPACKED = ProductWays(unpacked_from=0)
ROUNDED = ProductWays(rounded_from=0)
ROUNDED_FAST = ProductWays(rounded_from=0, adds_fast=True)
# Both ways to round multiply the same floats of 8 bits as plain torch. They differ in the last rounding, and in how
# precisely tensor cores add.
TOLERANCE = 2**-6
NO_MATRICES = "the model has no matrices in FP8 with a scale for each row, or for each block of 128 by 128"
# The tiles that are tried for a number of rows besides those without a measurement. Each is compiled, in one or two
# variants.
TILES: Mapping[int, tuple[MatrixTiles, ...]] = MappingProxyType(
    {
        16: (MatrixTiles(16, 64, 4, 6), MatrixTiles(16, 128, 4, 3)),
        64: (MatrixTiles(64, 128, 8, 3),),
        256: (MatrixTiles(128, 64, 4, 2),),
    }
)
PROGRAMS = (PROGRAMS_PER_SM, 2, 8)  # numbers of programs that are tried; these compile nothing
# The ways whose times are compared, by their names in the table of `oaiserve doctor`
WAYS = {"by a kernel": KERNEL, "unpacked": UNPACKED, "in FP8": ROUNDED, "in FP8, added fast": ROUNDED_FAST}
ROWS = (16, 64, 256, 1024, 2048)  # the numbers of rows from which another way may be taken

Times = dict[ProductWays, dict[int, float]]  # Seconds of one product with a matrix of each shape, by the number of rows


@torch.inference_mode()
def product_ways(weights: CudaWeights, seconds: Seconds = seconds_on_device) -> Probed:
    """Return in which ways products with packed matrices are fastest on this device, and why not in FP8.

    Raises what kernels raise: a start can't do without them.
    """
    dense = [one for one in weights.packed if not isinstance(one, ExpertMatrices)]
    matrices = list({(one.kind, one.shape, one.group_columns): one for one in dense}.values())
    if not matrices:
        return Probed({"fp8_products": NO_MATRICES})
    kernel, of_tiles = with_tiles(matrices, weights, seconds)
    times = timed((kernel, UNPACKED), matrices, weights, seconds)
    ways = replace(kernel, unpacked_from=least_rows(times[UNPACKED], times[kernel]))
    times[KERNEL] = times.pop(kernel)
    why_not = ""
    try:
        ways, in_fp8 = with_fp8(ways, [one for one in matrices if one.is_for_torch], weights, seconds)
        times |= in_fp8
    except NotUsed as not_used:
        why_not = str(not_used)
    return Probed({"fp8_products": why_not}, ways, as_table(times) | of_tiles)


def with_tiles(
    matrices: list[PackedMatrix], weights: CudaWeights, seconds: Seconds
) -> tuple[ProductWays, dict[str, dict[str, float]]]:
    """Return the kernel with its fastest tiles for each number of rows, and how long each of them takes.

    Tiles that do not fit on the device, or are wrong there, are not taken. The first error is raised if there are no
    others.
    """
    from oaiserve.engine.executors.cuda import triton_products  # The import needs Triton.

    chosen: list[MatrixTiles] = []
    table: dict[str, dict[str, float]] = {}
    for rows, others in TILES.items():
        taken: dict[MatrixTiles, float] = {}
        errors: list[Exception] = []
        for tiles in (triton_products.tiles_for(rows, weights.device), *others):
            way = replace(KERNEL, tiles=(tiles,))
            try:
                if not wrong_product(way, matrices, weights, (rows,)):
                    taken[tiles] = timed((way,), matrices, weights, seconds, (rows,))[way][rows]
                    table.setdefault(f"in {tiles}", {})[str(rows)] = taken[tiles]
            except Exception as error:
                errors.append(error)
        if not taken and errors:
            raise errors[0]
        if taken:
            chosen.append(min(taken, key=lambda tiles: taken[tiles]))
    ways = [replace(KERNEL, tiles=tuple(chosen), programs_per_sm=number) for number in PROGRAMS]
    few = ROWS[0]
    times = timed(ways, matrices, weights, seconds, (few,))
    return min(ways, key=lambda way: times[way][few]), table


class NotUsed(Exception):
    """Says why torch shall not compute something in place of a kernel."""


def with_fp8(
    ways: ProductWays, matrices: list[PackedMatrix], weights: CudaWeights, seconds: Seconds
) -> tuple[ProductWays, Times]:
    """Return ways that multiply these matrices in FP8 where that is faster, and how long each takes.

    Raises NotUsed if it is nowhere right and faster.
    """
    if not matrices:
        raise NotUsed(NO_MATRICES)
    both = (ROUNDED, ROUNDED_FAST)
    ends = ROWS[0], ROWS[-1]
    problems = {rounded: reason(partial(wrong_product, rounded, matrices, weights, ends)) for rounded in both}
    right = [rounded for rounded, problem in problems.items() if not problem]
    if not right:
        raise NotUsed(problems[ROUNDED])
    times = timed((ways, *right), matrices, weights, seconds)
    fastest = min(right, key=lambda rounded: times[rounded][ROWS[-1]])
    rounded_from = least_rows(times[fastest], times[ways])
    if rounded_from is None:
        raise NotUsed(unless_slower(times[fastest][ROWS[-1]], times[ways][ROWS[-1]]))
    del times[ways]
    return replace(ways, rounded_from=rounded_from, adds_fast=fastest.adds_fast), times


def wrong_product(way: ProductWays, matrices: list[PackedMatrix], weights: CudaWeights, all_rows: Iterable[int]) -> str:
    """Return the first difference of products from those of plain torch, or an empty text."""
    plain = expanded_product if way.rounded_from is None else rounded_product
    for matrix in matrices:
        for rows in all_rows:
            x = inputs_of(matrix, rows, weights)
            apart = difference(product_of(x, matrix, way)(), plain(x, matrix, None))
            if (problem := Difference("products", apart, TOLERANCE)).is_beyond_rounding:
                return f"{problem}"
    return ""


def timed(
    ways: Iterable[ProductWays],
    matrices: list[PackedMatrix],
    weights: CudaWeights,
    seconds: Seconds,
    all_rows: Iterable[int] | None = None,
) -> Times:
    return {
        way: {
            rows: sum(seconds(product_of(inputs_of(matrix, rows, weights), matrix, way)) for matrix in matrices)
            for rows in all_rows or ROWS
        }
        for way in ways
    }


def product_of(x: Tensor, matrix: PackedMatrix, way: ProductWays) -> Callable[[], Tensor]:
    from oaiserve.engine.executors.cuda import triton_products  # The import needs Triton.

    return partial(triton_products.multiply, x, matrix, None, way)


def inputs_of(matrix: PackedMatrix, rows: int, weights: CudaWeights) -> Tensor:
    return torch.randn(rows, matrix.shape[1], device=weights.device).to(weights.dtype)


def least_rows(times: Mapping[int, float], others: Mapping[int, float]) -> int | None:
    """Return from how many rows on the times are less than the others, or None."""
    least = None
    for rows in reversed(ROWS):
        if times[rows] >= others[rows]:
            break
        least = rows
    return least


def as_table(times: Times) -> dict[str, dict[str, float]]:
    return {
        name: {str(rows): seconds for rows, seconds in times[way].items()} for name, way in WAYS.items() if way in times
    }
