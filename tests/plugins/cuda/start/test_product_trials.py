"""Products take the way that is fastest on the device, and FP8 only where it is right. The device is a CPU."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.engine.model.attention import FP8
from oaiserve.plugins.cuda.executor.device_matrices import (
    PackedMatrix,
    Rounded,
    expanded_product,
    new_rounded,
    rounded_rows,
)
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.product_ways import PROGRAMS_PER_SM, UNMEASURED, MatrixTiles
from oaiserve.plugins.cuda.start import trials
from oaiserve.plugins.cuda.start.features import Probed
from oaiserve.plugins.cuda.start.trials import IN_FP8, TILES, product_ways
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import model_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from triton.runtime.errors import OutOfResources

from oaiserve.plugins.cuda.executor import triton_products
from tests.engine.executors import fake_gpu
from tests.plugins.cuda.executor.test_float8_products import BLOCKS, scaled_mm_of_hopper
from tests.plugins.cuda.start.test_fitting import Unfit

pytestmark = pytest.mark.kernels

(UNPACKED,) = trials.UNPACKED.values()
ROUNDED, ROUNDED_FAST = IN_FP8.values()
SMALL = MatrixTiles(16, 32, 4, 2)
WIDE = MatrixTiles(16, 64, 4, 4)  # This one and the next are those without a measurement.
LARGE = MatrixTiles(128, 128, 8, 3)
LAUNCH = triton_products._launch


@pytest.fixture(scope="module")
def weights() -> CudaWeights:
    return CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU, in_float8=True)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try few rows, and no other tiles, with doubles of the kernels that a clock doesn't run."""
    monkeypatch.setattr(trials, "TILES", {(16, 1): (), (66,): ()})
    monkeypatch.setattr(triton_products, "unpacked", lambda matrix, dtype: matrix.expand(dtype))
    monkeypatch.setattr(triton_products, "_launch", launched_in_plain_torch)
    monkeypatch.setattr(triton_products, "rounded_rows", rounded_in_plain_torch)


def rounded_in_plain_torch(x: torch.Tensor, group: int = 0) -> Rounded:
    codes, scales = rounded_rows(x, group)
    rounded = new_rounded(*x.shape, group, CPU)
    rounded.codes[: len(x)] = codes
    rounded.scales[: len(x)] = scales
    return rounded


def launched_in_plain_torch(x: Any, matrix: PackedMatrix, bias: Any, out: torch.Tensor, *_: Any) -> None:
    out.copy_(expanded_product(x, matrix, bias))


def chosen(found: Probed) -> tuple[int | None, int | None, bool]:
    """Return from how many rows on matrices are unpacked, and inputs rounded, and whether sums are fast then."""
    return found.ways.unpacked_from, found.ways.rounded_from, found.ways.adds_fast


def clock(
    *, kernel: float = 1.0, unpacked: float = 1.0, rounded: float = 1.0, fast: float = 1.0
) -> Callable[[Any], float]:
    """Return a clock that runs nothing. A kernel takes `kernel` seconds for each row, others the same for any rows."""
    constant = {UNPACKED: unpacked, ROUNDED: rounded, ROUNDED_FAST: fast}

    def seconds(run: Any) -> float:
        x, *_, way = run.args
        return constant.get(way, kernel * len(x))

    return seconds


@pytest.mark.parametrize(("seconds", "unpacked_from"), [(0.5, 1), (1.0, 16), (15.0, 16), (16.0, 66), (66.0, None)])
def test_matrices_are_unpacked_from_the_least_rows_on_for_which_that_is_faster(
    weights: CudaWeights, seconds: float, unpacked_from: int | None
) -> None:
    found = product_ways(weights, clock(unpacked=seconds, rounded=100.0, fast=100.0))
    assert chosen(found) == (unpacked_from, None, False)


def test_a_way_that_is_faster_for_few_rows_alone_is_not_taken(weights: CudaWeights) -> None:
    times = {UNPACKED: (0, 0, 4), ROUNDED: (9, 9, 9), ROUNDED_FAST: (9, 9, 9)}
    found = product_ways(weights, lambda run: times.get(run.args[-1], (1, 2, 3))[(1, 16, 66).index(len(run.args[0]))])
    assert found.ways.unpacked_from is None


@pytest.mark.parametrize(
    ("rounded", "fast", "ways"),
    [
        (20.0, 30.0, (16, None, False)),
        (2.0, 3.0, (16, 16, False)),
        (3.0, 2.0, (16, 16, True)),
        (0.5, 0.6, (16, 1, False)),
    ],
)
def test_products_in_fp8_begin_where_they_are_faster_than_the_best_other_way(
    weights: CudaWeights, rounded: float, fast: float, ways: tuple[int, int | None, bool]
) -> None:
    found = product_ways(weights, clock(unpacked=10.0, rounded=rounded, fast=fast))
    assert chosen(found) == ways
    is_off = ways[1] is None
    number = len({one.shape for one in weights.packed})
    said = f"torch takes {20 * number}000000 µs for what takes kernels {10 * number}000000 µs" if is_off else ""
    assert found.verdict == {"fp8_products": said}


def test_the_table_has_the_time_of_each_way_that_could_be_taken(weights: CudaWeights) -> None:
    number = len({one.shape for one in weights.packed})
    assert product_ways(weights, clock(unpacked=10.0, rounded=2.0, fast=3.0)).seconds == {
        f"in {WIDE}": {1: number, 16: 16 * number},
        f"in {LARGE}": {66: 66 * number},
        "unpacked": {1: 10 * number, 16: 10 * number, 66: 10 * number},
        "in FP8": {1: 2 * number, 16: 2 * number, 66: 2 * number},
        "in FP8, added fast": {1: 3 * number, 16: 3 * number, 66: 3 * number},
    }


@pytest.mark.parametrize("wrong", [1.02, torch.nan])
@pytest.mark.parametrize("is_slow_right", [True, False])
def test_products_that_are_wrong_are_not_used(
    weights: CudaWeights, wrong: float, is_slow_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch._scaled_mm

    def multiply(*given: Any, use_fast_accum: bool, **named: Any) -> torch.Tensor:
        factor = 1 if is_slow_right and not use_fast_accum else wrong
        return factor * right(*given, use_fast_accum=use_fast_accum, **named)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    found = product_ways(weights, clock(rounded=0.5, fast=0.1))
    assert chosen(found) == (16, 1 if is_slow_right else None, False)
    assert "in FP8, added fast" not in found.seconds
    said = found.verdict["fp8_products"]
    assert said == "" if is_slow_right else said.startswith("products would differ by ")


def test_an_error_of_torch_leaves_the_other_ways(weights: CudaWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    found = product_ways(weights, clock(unpacked=0.5))
    assert chosen(found) == (1, None, False)
    assert found.verdict["fp8_products"].startswith("RuntimeError: torch._scaled_mm is only supported on CUDA devices")


@pytest.mark.parametrize("is_hopper", [True, False])
def test_matrices_with_scales_of_blocks_are_tried(is_hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_hopper:
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm_of_hopper)
    stored: Any = SimpleNamespace(packed=[BLOCKS], dtype=torch.bfloat16, device=CPU)
    found = product_ways(stored, clock(unpacked=10.0, rounded=2.0, fast=3.0))
    assert chosen(found) == (16, 16 if is_hopper else None, False)
    assert found.verdict["fp8_products"].startswith("" if is_hopper else "ValueError: Invalid scaling configuration")


MORE_PROGRAMS = WIDE._replace(programs_per_sm=8)


def tiles_clock(times: Mapping[MatrixTiles, float]) -> Callable[..., float]:
    """Return a clock for the tiles of a product."""
    return lambda run: times.get(run.args[-1].tiles_for(len(run.args[0])), 1.0)


@pytest.mark.parametrize(("small", "fastest"), [(0.1, SMALL), (0.3, MORE_PROGRAMS)])
def test_the_fastest_tiles_are_taken_for_each_number_of_rows(
    weights: CudaWeights, small: float, fastest: MatrixTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "TILES", {(1,): (SMALL, MORE_PROGRAMS), (66,): ()})
    found = product_ways(weights, tiles_clock({SMALL: small, WIDE: 0.25, MORE_PROGRAMS: 0.2}))
    assert found.ways.tiles == (fastest, LARGE)
    assert [found.ways.tiles_for(rows) for rows in (1, 16, 17, 64, 2048)] == [fastest, fastest, LARGE, LARGE, LARGE]
    number = len({one.shape for one in weights.packed})
    of_small = found.seconds["in tiles of 16 by 32 with 4 warps, 2 stages, 4 programs per multiprocessor"]
    assert of_small == {1: pytest.approx(number * small)}
    assert found.seconds[f"in {LARGE}"].keys() == {66}


class ForTiles:
    """Replaces the kernel of products by another one for tiles of some numbers of rows of the matrix."""

    def __init__(self, kernel: Any, sizes: Collection[int], other: Any) -> None:
        self._kernel = kernel
        self._sizes = sizes
        self._other = other

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            kernel = self._other if named["TILE_N"] in self._sizes else self._kernel
            kernel[grid](*args, **named)

        return launch


class Negated:
    """Replaces the kernel of products: their results have the wrong sign."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._out = list(inspect.signature(kernel.fn).parameters).index("out")

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            self._kernel[grid](*args, **named)
            args[self._out].neg_()

        return launch


@pytest.mark.parametrize("is_wrong", [True, False])
def test_tiles_that_do_not_fit_or_are_wrong_are_not_taken(
    weights: CudaWeights, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "TILES", {(1,): (SMALL,), (66,): ()})
    monkeypatch.setattr(triton_products, "_launch", LAUNCH)
    kernel = triton_products.product_kernel
    other = Negated(kernel) if is_wrong else Unfit()
    monkeypatch.setattr(triton_products, "product_kernel", ForTiles(kernel, [32], other))
    found = product_ways(weights, tiles_clock({SMALL: 0.1}))
    assert found.ways.tiles == (WIDE, LARGE)
    assert f"in {SMALL}" not in found.seconds
    monkeypatch.setattr(triton_products, "product_kernel", ForTiles(kernel, [32, 128], Unfit()))
    with pytest.raises(OutOfResources):
        product_ways(weights, tiles_clock({}))


@pytest.fixture(scope="module")
def mixture() -> CudaWeights:
    return CudaWeights(model_of(config_of("qwen3_moe")).decoder, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize(("small", "is_wrong"), [(0.1, False), (0.3, False), (0.1, True)])
def test_the_fastest_tiles_that_are_right_are_taken_for_experts(
    mixture: CudaWeights, small: float, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "EXPERT_TILES", {(1,): (SMALL,), (33,): ()})
    monkeypatch.setattr(trials, "plain_product_of_experts", noted := Noted(trials.plain_product_of_experts))
    monkeypatch.setattr(triton_products, "_launch", LAUNCH)
    if is_wrong:
        kernel = triton_products.product_kernel
        monkeypatch.setattr(triton_products, "product_kernel", ForTiles(kernel, [32], Negated(kernel)))
    times = {SMALL: small, WIDE: 0.2, triton_products.LARGEST_OF_EXPERTS: 0.4}
    found = product_ways(mixture, lambda run: times[run.args[-1].expert_tiles[0]])
    few = SMALL if small < 0.2 and not is_wrong else WIDE
    assert found.ways.expert_tiles == (few, triton_products.LARGEST_OF_EXPERTS)
    num_experts = len(mixture.packed[0].codes)
    assert noted.rows == {num_experts, 33 * num_experts}
    number = len({one.shape for one in mixture.packed})
    of_small = {f"of experts in {SMALL}": {1: pytest.approx(number * small)}}
    assert found.seconds == ({} if is_wrong else of_small) | {
        f"of experts in {WIDE}": {1: pytest.approx(number * 0.2)},
        f"of experts in {triton_products.LARGEST_OF_EXPERTS}": {33: pytest.approx(number * 0.4)},
    }
    assert triton_products.planned(torch.tensor([[0, 2], [1, 2]]), num_experts, found.ways).tiles == few


class Noted:
    """Computes a product of experts, and notes its rows."""

    def __init__(self, product: Callable[..., torch.Tensor]) -> None:
        self.rows: set[int] = set()
        self._product = product

    def __call__(self, x: torch.Tensor, *others: Any) -> torch.Tensor:
        self.rows.add(len(x))
        return self._product(x, *others)


SHAPES = {
    "8B": [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336)],
    "70B": [(10_240, 8192), (8192, 8192), (57_344, 8192), (8192, 28_672)],
}


@pytest.mark.parametrize("shapes", ["8B", "70B"])
def test_a_start_compiles_few_kernels_for_products(shapes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes about a second, a start may try them for ten, and it needs some of them anyway."""
    monkeypatch.undo()
    monkeypatch.setattr(trials, "refuse_wrong", lambda *_: None)
    monkeypatch.setattr(fake_gpu, "VARIANTS", set())
    fake_gpu.replace_kernels(monkeypatch, [triton_products], torch.bfloat16)
    on_gpu = {"device": fake_gpu.GPU}
    matrices = [
        PackedMatrix("float8", torch.empty(n, k, dtype=FP8, **on_gpu), torch.empty(1, n, **on_gpu), None)
        for n, k in SHAPES[shapes]
    ]
    stored: Any = SimpleNamespace(packed=matrices, dtype=torch.bfloat16, **on_gpu)
    product_ways(stored, clock_of_nothing)
    others = [one for tiles in TILES.values() for one in tiles if one.programs_per_sm == PROGRAMS_PER_SM]
    compiled = [name for name, *_ in fake_gpu.VARIANTS if name == "product_kernel"]
    assert len(TILES) + len(others) <= len(compiled) <= 14


def clock_of_nothing(run: Callable[[], object]) -> float:
    run()
    return 1.0


def test_a_model_without_packed_matrices_has_nothing_to_time() -> None:
    plain = CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU)
    found = product_ways(plain, clock())
    assert (found.ways, found.seconds) == (UNMEASURED, {})
    assert found.verdict == {"fp8_products": trials.NO_MATRICES}
