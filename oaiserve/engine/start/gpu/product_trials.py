"""Times products with packed matrices and with those of experts in several ways on this device, and chooses the fastest
for each number of rows. A probe does so in its process, because the device may fail in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from msgspec.structs import replace
from torch import Tensor

from oaiserve.engine.executors.cuda.device_matrices import ExpertMatrices, PackedMatrix, expanded_product, plain_product
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.product_ways import PROGRAMS_PER_SM, UNMEASURED, MatrixTiles, ProductWays
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
# The same for matrices of experts, by the rows of each expert.
EXPERT_TILES: Mapping[int, tuple[MatrixTiles, ...]] = MappingProxyType(
    {16: (MatrixTiles(16, 128, 4, 3),), 64: (MatrixTiles(64, 64, 4, 3),)}
)
PROGRAMS = (PROGRAMS_PER_SM, 2, 8)  # numbers of programs that are tried; these compile nothing
FEW = 16  # the rows with which they are
# The ways to round, by their names in the table of `oaiserve doctor`
IN_FP8 = MappingProxyType({"in FP8": ROUNDED, "in FP8, added fast": ROUNDED_FAST})
ROWS = (1, 16, 64, 256, 1024, 2048)  # the numbers of rows from which another way may be taken


@torch.inference_mode()
def product_ways(weights: CudaWeights, seconds: Seconds = seconds_on_device) -> Probed:
    """Return in which ways products are fastest on this device, and why not in FP8.

    Raises what kernels raise: a start can't do without them.
    """
    different = {(type(one), one.kind, one.shape, one.group_columns): one for one in weights.packed}.values()
    matrices = [one for one in different if not isinstance(one, ExpertMatrices)]
    trials = Trials(weights, seconds)
    ways = trials.by_kernel_or_unpacked(matrices) if matrices else UNMEASURED
    ways, why_not = trials.with_fp8(ways, [one for one in matrices if one.is_for_torch])
    if experts := [one for one in different if isinstance(one, ExpertMatrices)]:
        ways = replace(ways, expert_tiles=trials.fastest_tiles(EXPERT_TILES, experts))
    return Probed({"fp8_products": why_not}, ways, trials.table)


class Trials:
    """Products with matrices of a model, and how long they have taken."""

    def __init__(self, weights: CudaWeights, seconds: Seconds) -> None:
        self.table: dict[str, dict[str, float]] = {}  # as `Probed.seconds`
        self._weights = weights
        self._seconds = seconds

    def by_kernel_or_unpacked(self, matrices: Sequence[PackedMatrix]) -> ProductWays:
        """Return the way in which the kernel is fastest, with unpacked matrices where that is faster."""
        tiles = self.fastest_tiles(TILES, matrices)
        kernels = [replace(KERNEL, tiles=tiles, programs_per_sm=number) for number in PROGRAMS]
        kernel = min(kernels, key=lambda way: self._time(way, matrices, FEW))
        by_kernel = self._times("by a kernel", kernel, matrices)
        return replace(kernel, unpacked_from=least_rows(self._times("unpacked", UNPACKED, matrices), by_kernel))

    def fastest_tiles(
        self, candidates: Mapping[int, tuple[MatrixTiles, ...]], matrices: Sequence[PackedMatrix]
    ) -> tuple[MatrixTiles, ...]:
        """Return the kernel's fastest tiles for each number of rows.

        Tiles that do not fit on the device, or are wrong there, are not taken. The first error is raised if there are
        no others.
        """
        from oaiserve.engine.executors.cuda import triton_products  # The import needs Triton.

        of_experts = isinstance(matrices[0], ExpertMatrices)
        chosen: list[MatrixTiles] = []
        for rows, others in candidates.items():
            taken: dict[MatrixTiles, float] = {}
            errors: list[Exception] = []
            for tiles in (triton_products.tiles_for(rows, self._weights.device, of_experts=of_experts), *others):
                way = replace(KERNEL, **{"expert_tiles" if of_experts else "tiles": (tiles,)})
                try:
                    if not self._wrong(way, matrices, rows):
                        taken[tiles] = self._time(way, matrices, rows)
                        self.table.setdefault(f"{'of experts ' * of_experts}in {tiles}", {})[str(rows)] = taken[tiles]
                except Exception as error:
                    errors.append(error)
            if not taken and errors:
                raise errors[0]
            if taken:
                chosen.append(min(taken, key=lambda tiles: taken[tiles]))
        return tuple(chosen)

    def with_fp8(self, ways: ProductWays, matrices: Sequence[PackedMatrix]) -> tuple[ProductWays, str]:
        """Return ways that multiply these matrices in FP8 where that is right and faster, or why they never do so."""
        if not matrices:
            return ways, NO_MATRICES
        problems = {
            name: reason(partial(self._wrong, way, matrices, ROWS[0], ROWS[-1])) for name, way in IN_FP8.items()
        }
        right = {IN_FP8[name]: name for name, problem in problems.items() if not problem}
        if not right:
            return ways, problems["in FP8"]
        times = {way: self._times(name, way, matrices) for way, name in right.items()}
        fastest = min(right, key=lambda way: times[way][ROWS[-1]])
        others = {rows: self._time(ways, matrices, rows) for rows in ROWS}
        rounded_from = least_rows(times[fastest], others)
        if rounded_from is None:
            return ways, unless_slower(times[fastest][ROWS[-1]], others[ROWS[-1]])
        return replace(ways, rounded_from=rounded_from, adds_fast=fastest.adds_fast), ""

    def _wrong(self, way: ProductWays, matrices: Sequence[PackedMatrix], *all_rows: int) -> str:
        """Return the first difference of products from those of plain torch, or an empty text."""
        for matrix in matrices:
            for rows in all_rows:
                product = self._product(way, matrix, rows)
                plain = plain_expert_product if isinstance(matrix, ExpertMatrices) else plain_product
                apart = difference(product(), plain(*product.args))
                if (problem := Difference("products", apart, TOLERANCE)).is_beyond_rounding:
                    return f"{problem}"
        return ""

    def _times(self, name: str, way: ProductWays, matrices: Sequence[PackedMatrix]) -> dict[int, float]:
        """Return the seconds of one product with each matrix, by the number of rows, and note them in the table."""
        times = {rows: self._time(way, matrices, rows) for rows in ROWS}
        self.table[name] = {str(rows): seconds for rows, seconds in times.items()}
        return times

    def _time(self, way: ProductWays, matrices: Iterable[PackedMatrix], rows: int) -> float:
        return sum(self._seconds(self._product(way, matrix, rows)) for matrix in matrices)

    def _product(self, way: ProductWays, matrix: PackedMatrix, rows: int) -> partial[Tensor]:
        """Return a product with random rows, or with as many for each expert."""
        from oaiserve.engine.executors.cuda import triton_products  # The import needs Triton.

        multiply: Callable[..., Tensor] = triton_products.multiply
        if isinstance(matrix, ExpertMatrices):
            rows *= len(matrix.codes)
            multiply = expert_product
        x = torch.randn(rows, matrix.shape[1], device=self._weights.device).to(self._weights.dtype)
        return partial(multiply, x, matrix, None, way)


def expert_product(x: Tensor, matrices: ExpertMatrices, factors: Tensor | None, way: ProductWays) -> Tensor:
    """Return the products of rows with the matrices of all experts in turn."""
    from oaiserve.engine.executors.cuda import triton_products

    num_experts = len(matrices.codes)
    plan = triton_products.planned(torch.arange(len(x), device=x.device) % num_experts, num_experts, way)
    return triton_products.product(x, matrices, plan, pairs_of_row=1, factors=factors)


def plain_expert_product(x: Tensor, matrices: ExpertMatrices, *_: object) -> Tensor:
    """Compute `expert_product` in plain torch."""
    products = [
        expanded_product(rows, matrices.of(expert), None if matrices.bias is None else matrices.bias[expert])
        for expert, rows in enumerate(x.unflatten(0, (-1, len(matrices.codes))).unbind(1))
    ]
    return torch.stack(products, dim=1).flatten(0, 1)


def least_rows(times: Mapping[int, float], others: Mapping[int, float]) -> int | None:
    """Return from how many rows on the times are less than the others, or None."""
    least = None
    for rows in reversed(ROWS):
        if times[rows] >= others[rows]:
            break
        least = rows
    return least
