"""Tries the ways in which this device can compute products and layers with a state.

Each candidate is compared with plain torch, and the correct ones are timed. A probe does this in its own process,
because the device may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from types import MappingProxyType

import torch
from msgspec.structs import replace
from torch import Tensor

from oaiserve.checkpoints.load_errors import named
from oaiserve.engine.decoder.description import DeltaNet, Layer, Mamba2
from oaiserve.engine.executors.reference.mixers import recurrence
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE, Difference, difference
from oaiserve.plugins.cuda.executor.chunked_states import chunked
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices, PackedMatrix, expanded_product, plain_product
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.product_ways import UNMEASURED, MatrixTiles, ProductWays
from oaiserve.plugins.cuda.start.features import Probed

Seconds = Callable[[Callable[[], object]], float]
# Keyed by numbers of rows: the tiles to try for them, in addition to the defaults. The first number decides. Each is
# compiled, in one or two variants.
Tried = Mapping[tuple[int, ...], tuple[MatrixTiles, ...]]

RUNS = 4  # The fastest run counts.
FLUSHED_BYTES = 128 << 20  # more than the L2 cache of any card
# The device sleeps for a millisecond or two while the host launches all runs. Otherwise, a small product would take as
# long as its launch, which a CUDA graph doesn't have.
SLEEP_CYCLES = 2_000_000
STATE_ROWS = 2048  # tokens of the prompt used to time layers with a state
# All ways multiply the same floats as plain torch. They differ in the last rounding, and in the precision of tensor
# cores' sums.
TOLERANCE = 2**-6
NO_MATRICES = "the model has no matrices in FP8 with a scale for each row, or for each block of 128 by 128"
TILES: Tried = MappingProxyType(
    {
        (16, 1): (
            MatrixTiles(16, 64, 4, 6),
            MatrixTiles(16, 128, 4, 3),
            MatrixTiles(16, 64, 4, 4, programs_per_sm=2),  # This one and the next are already compiled.
            MatrixTiles(16, 64, 4, 4, programs_per_sm=8),
        ),
        (64,): (MatrixTiles(64, 128, 8, 3),),
        (256, 1024, 2048): (MatrixTiles(128, 64, 4, 2),),
    }
)
# The same for matrices of experts, by the rows of each expert.
EXPERT_TILES: Tried = MappingProxyType({(16,): (MatrixTiles(16, 128, 4, 3),), (64,): (MatrixTiles(64, 64, 4, 3),)})
# Ways of computing products with any number of rows, by their names in the table of `oaiserve doctor`.
KERNEL = ProductWays(unpacked_from=None)
UNPACKED = MappingProxyType({"unpacked": ProductWays(unpacked_from=0)})
IN_FP8 = MappingProxyType(
    {"in FP8": ProductWays(rounded_from=0), "in FP8, added fast": ProductWays(rounded_from=0, adds_fast=True)}
)


class Wrong(Exception):
    """On this device, a candidate's result differs from plain torch."""


def seconds_on_device(run: Callable[[], object]) -> float:
    """Return the seconds that the device takes for a compiled run.

    Nothing of it is in the device's caches, as in a step.
    """
    run()
    others = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(RUNS)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for begin, end in events:
        others.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return min(float(begin.elapsed_time(end)) for begin, end in events) / 1e3


@torch.inference_mode()
def product_ways(weights: CudaWeights, seconds: Seconds = seconds_on_device) -> Probed:
    """Return the ways in which products are fastest on this device, and why FP8 isn't used.

    Raises the kernels' errors, because a start can't do without them.
    """
    different = {(type(one), one.kind, one.shape, one.group_columns): one for one in weights.packed}.values()
    matrices = [one for one in different if not isinstance(one, ExpertMatrices)]
    experts = [one for one in different if isinstance(one, ExpertMatrices)]
    trials = Trials(weights, seconds)
    ways = UNMEASURED
    why_not = NO_MATRICES
    if matrices:
        tiles, times = trials.fastest_tiles(TILES, matrices)
        _, unpacked = trials.fastest(UNPACKED, matrices, [*times])
        ways = ProductWays(least_rows(unpacked, times), tiles=tiles)
        times |= {rows: unpacked[rows] for rows in times if ways.unpacks(rows)}
        if any(one.is_for_torch for one in matrices):
            try:
                rounding, rounded = trials.fastest(IN_FP8, matrices, [*times])
            except Exception as error:
                why_not = reason(error)
            else:
                why_not = unless_slower(rounded[max(times)], times[max(times)])
                if not why_not:
                    ways = replace(ways, rounded_from=least_rows(rounded, times), adds_fast=rounding.adds_fast)
    if experts:
        ways = replace(ways, expert_tiles=trials.fastest_tiles(EXPERT_TILES, experts)[0])
    return Probed({"fp8_products": why_not}, ways, trials.table)


class Trials:
    """Products with matrices of a model, and the measured times."""

    def __init__(self, weights: CudaWeights, seconds: Seconds) -> None:
        from oaiserve.plugins.cuda.executor import triton_products  # The import needs Triton.

        self.table: dict[str, dict[int, float]] = {}  # as `Probed.seconds`
        self._weights = weights
        self._seconds = seconds
        self._kernels = triton_products

    def fastest_tiles(
        self, tried: Tried, matrices: Sequence[PackedMatrix]
    ) -> tuple[tuple[MatrixTiles, ...], dict[int, float]]:
        """Return the kernel's fastest tiles in the order of their rows, and the seconds by number of rows."""
        of_experts = isinstance(matrices[0], ExpertMatrices)
        field, name = ("expert_tiles", "of experts in") if of_experts else ("tiles", "in")
        chosen: tuple[MatrixTiles, ...] = ()
        times: dict[int, float] = {}
        for all_rows, others in tried.items():
            unmeasured = self._kernels.tiles_for(all_rows[0], self._weights.device, of_experts=of_experts)
            ways = {f"{name} {tiles}": replace(KERNEL, **{field: (tiles,)}) for tiles in (unmeasured, *others)}
            way, seconds = self.fastest(ways, matrices, all_rows)
            chosen += way.expert_tiles or way.tiles
            times |= seconds
        return chosen, times

    def fastest(
        self, candidates: Mapping[str, ProductWays], matrices: Sequence[PackedMatrix], all_rows: Sequence[int]
    ) -> tuple[ProductWays, dict[int, float]]:
        """Return the fastest candidate for the first number of rows, and its seconds by number of rows.

        Candidates that don't fit on the device, or are wrong there, are skipped. If no others are left, the first error
        is raised.
        """
        times: dict[str, dict[int, float]] = {}
        errors: list[Exception] = []
        for name, way in candidates.items():
            try:
                times[name] = {rows: self._tried(way, matrices, rows) for rows in all_rows}
            except Exception as error:
                errors.append(error)
        if not times:
            raise errors[0]
        self.table |= times
        fastest = min(times, key=lambda name: times[name][all_rows[0]])
        return candidates[fastest], times[fastest]

    def _tried(self, way: ProductWays, matrices: Sequence[PackedMatrix], rows: int) -> float:
        """Compare a product with each matrix with the result of plain torch, and return the total seconds."""
        seconds = 0.0
        for matrix in matrices:
            multiply: Callable[..., Tensor] = self._kernels.multiply
            plain: Callable[..., Tensor] = plain_product
            number = 1
            if isinstance(matrix, ExpertMatrices):
                multiply = self.product_of_experts
                plain = plain_product_of_experts
                number = len(matrix.codes)
            x = torch.randn(number * rows, matrix.shape[1], device=self._weights.device)
            product = partial(multiply, x.to(self._weights.dtype), matrix, None, way)
            refuse_wrong(product, plain)
            seconds += self._seconds(product)
        return seconds

    def product_of_experts(self, x: Tensor, matrices: ExpertMatrices, factors: None, way: ProductWays) -> Tensor:
        """Return the products of rows with the matrices of all experts in turn."""
        num_experts = len(matrices.codes)
        plan = self._kernels.planned(torch.arange(len(x), device=x.device) % num_experts, num_experts, way)
        return self._kernels.product(x, matrices, plan, pairs_of_row=1, factors=factors)


def refuse_wrong(product: partial[Tensor], plain: Callable[..., Tensor]) -> None:
    refuse_difference("products", product(), plain(*product.args), TOLERANCE)


def plain_product_of_experts(x: Tensor, matrices: ExpertMatrices, *_: object) -> Tensor:
    """Compute `Trials.product_of_experts` in plain torch."""
    number = len(matrices.codes)
    biases = [None] * number if matrices.bias is None else matrices.bias
    products = [expanded_product(x[expert::number], matrices.of(expert), biases[expert]) for expert in range(number)]
    return torch.stack(products, dim=1).flatten(0, 1)


def least_rows(times: Mapping[int, float], others: Mapping[int, float]) -> int | None:
    """Return the number of rows from which on `times` are lower than the others, or None."""
    return min(takewhile(lambda rows: times[rows] < others[rows], sorted(times, reverse=True)), default=None)


@torch.inference_mode()
def state_chunks(layers: Iterable[Layer], device: torch.device, seconds: Seconds = seconds_on_device) -> str:
    """Return why prompts of layers with a state should not be computed in chunks, or an empty text.

    One layer of each shape is tried.
    """
    from oaiserve.plugins.cuda.executor import triton_states

    shapes = {shape_of(layer.mixer) for layer in layers if isinstance(layer.mixer, DeltaNet | Mamba2)}
    if not shapes:
        return "no layer of the model has a state that prompts walk through"
    in_chunks = 0.0
    walking = 0.0
    for heads, key_heads, key_dim, value_dim, has_rate in shapes:
        tokens = (1, STATE_ROWS)
        of_heads, rates = torch.rand(2, *tokens, heads, device=device)
        key, query = torch.randn(2, *tokens, key_heads, key_dim, device=device) * key_dim**-0.5
        value = torch.randn(*tokens, heads, value_dim, device=device)
        inputs = (1 - of_heads / 16, key, value, query, rates if has_rate else None)
        one, other = torch.randn(1, heads, key_dim, value_dim, device=device).repeat(2, 1, 1, 1).split(1)
        refuse_difference("outputs", chunked(one, *inputs), recurrence(other, *inputs), FLOAT32_TOLERANCE)
        refuse_difference("states", one, other, FLOAT32_TOLERANCE)
        in_chunks += seconds(partial(chunked, one, *inputs))
        walking += seconds(partial(triton_states.recurrence, other, *inputs))
    return unless_slower(in_chunks, walking)


def shape_of(mixer: DeltaNet | Mamba2) -> tuple[int, int, int, int, bool]:
    """Return the numbers of heads and key heads, the dimensions of keys and values, and whether tokens have rates."""
    if isinstance(mixer, DeltaNet):
        return mixer.value_heads, mixer.key_heads, mixer.key_dim, mixer.value_dim, True
    return mixer.heads, mixer.groups, mixer.state_dim, mixer.head_dim, False


def refuse_difference(what: str, values: Tensor, expected: Tensor, limit: float) -> None:
    apart = Difference(what, difference(values, expected), limit)
    if apart.is_beyond_rounding:
        raise Wrong(f"{apart}")


def unless_slower(by_torch: float, by_kernels: float) -> str:
    if by_torch < by_kernels:
        return ""
    return f"torch takes {by_torch * 1e6:.0f} µs for what takes kernels {by_kernels * 1e6:.0f} µs"


def reason(error: Exception) -> str:
    """Return why a candidate is rejected. A library may raise anything for a device that it can't use."""
    return str(error) if isinstance(error, Wrong) else named(error)
