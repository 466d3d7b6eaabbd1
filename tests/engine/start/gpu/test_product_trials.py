"""Products take the way that is fastest on the device, and FP8 only where it is right. The device is a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.executors.cuda.product_ways import UNMEASURED, ProductWays
from oaiserve.engine.start.gpu import product_trials
from oaiserve.engine.start.gpu.product_trials import KERNEL, ROUNDED, ROUNDED_FAST, UNPACKED, product_ways
from tests.engine.executors.cuda.step_runs import model_of
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

pytestmark = pytest.mark.kernels

FROM_1 = ProductWays(unpacked_from=1)


@pytest.fixture(scope="module")
def weights() -> CudaWeights:
    return CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU, in_float8=True)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_trials, "ROWS", (1, 16, 66))


def clock(
    *, kernel: float = 1.0, unpacked: float = 1.0, rounded: float = 1.0, fast: float = 1.0
) -> Callable[[Any], float]:
    """Return a clock that runs nothing. A kernel takes `kernel` seconds for each row, others the same for any rows."""
    constant = {UNPACKED: unpacked, ROUNDED: rounded, ROUNDED_FAST: fast}

    def seconds(run: Any) -> float:
        x, *_, way = run.args
        if way in constant:
            return constant[way]
        return min(kernel * len(x), unpacked if way.unpacks(len(x)) else float("inf"))

    return seconds


@pytest.mark.parametrize(("seconds", "unpacked_from"), [(0.5, 1), (1.0, 16), (15.0, 16), (16.0, 66), (66.0, None)])
def test_matrices_are_unpacked_from_the_least_rows_on_for_which_that_is_faster(
    weights: CudaWeights, seconds: float, unpacked_from: int | None
) -> None:
    found = product_ways(weights, clock(unpacked=seconds, rounded=100.0, fast=100.0))
    assert found.ways == ProductWays(unpacked_from)


def test_a_way_that_is_faster_for_few_rows_alone_is_not_taken(weights: CudaWeights) -> None:
    times = {KERNEL: (1, 2, 3), UNPACKED: (0, 0, 4)}
    found = product_ways(weights, lambda run: times.get(run.args[-1], (9, 9, 9))[(1, 16, 66).index(len(run.args[0]))])
    assert found.ways.unpacked_from is None


@pytest.mark.parametrize(
    ("rounded", "fast", "ways"),
    [
        (20.0, 30.0, ProductWays(16, rounded_from=None)),
        (2.0, 3.0, ProductWays(16, rounded_from=16)),
        (3.0, 2.0, ProductWays(16, rounded_from=16, adds_fast=True)),
        (0.5, 0.6, ProductWays(16, rounded_from=1)),
    ],
)
def test_products_in_fp8_begin_where_they_are_faster_than_the_best_other_way(
    weights: CudaWeights, rounded: float, fast: float, ways: ProductWays
) -> None:
    found = product_ways(weights, clock(unpacked=10.0, rounded=rounded, fast=fast))
    assert found.ways == ways
    is_off = ways.rounded_from is None
    number = len({one.shape for one in weights.packed})
    said = f"torch takes {20 * number}000000 µs for what takes kernels {10 * number}000000 µs" if is_off else ""
    assert found.verdict == {"fp8_products": said}


def test_the_table_has_the_time_of_each_way_that_could_be_taken(weights: CudaWeights) -> None:
    number = len({one.shape for one in weights.packed})
    assert product_ways(weights, clock(unpacked=10.0, rounded=2.0, fast=3.0)).seconds == {
        "by a kernel": {"1": number, "16": 16 * number, "66": 66 * number},
        "unpacked": {"1": 10 * number, "16": 10 * number, "66": 10 * number},
        "in FP8": {"1": 2 * number, "16": 2 * number, "66": 2 * number},
        "in FP8, added fast": {"1": 3 * number, "16": 3 * number, "66": 3 * number},
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
    assert found.ways == ProductWays(16, rounded_from=1 if is_slow_right else None)
    assert "in FP8, added fast" not in found.seconds
    said = found.verdict["fp8_products"]
    assert said == "" if is_slow_right else said.startswith("products would differ by ")


def test_an_error_of_torch_leaves_the_other_ways(weights: CudaWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    found = product_ways(weights, clock(unpacked=0.5))
    assert found.ways == FROM_1
    assert found.verdict["fp8_products"].startswith("RuntimeError: torch._scaled_mm is only supported on CUDA devices")


def test_a_model_without_packed_matrices_has_nothing_to_time() -> None:
    plain = CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU)
    found = product_ways(plain, clock())
    assert (found.ways, found.seconds) == (UNMEASURED, {})
    assert found.verdict == {"fp8_products": "the model has no matrices in FP8 with one scale for each row"}
