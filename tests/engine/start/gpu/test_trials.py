"""What torch computes in place of kernels is used only if it is right here, and faster. The device is a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oaiserve.engine.executors.cuda import chunked_states
from oaiserve.engine.executors.cuda.executor import CudaWeights
from oaiserve.engine.start.gpu import trials
from tests.engine.executors.cuda.step_runs import model_of
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.executors.cuda import triton_products, triton_states

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def weights() -> CudaWeights:
    return CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU, in_float8=True)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "ROWS", 66)


def seconds(by_torch: float) -> Callable[[Any], float]:
    """Return a clock for which kernels take 1 µs."""
    return lambda run: by_torch if run.func is triton_products.multiply_in_float8 else 1e-6


def test_products_that_are_right_and_faster_are_used(weights: CudaWeights) -> None:
    assert trials.fp8_products(weights, seconds(0.9e-6)) == ""


def test_products_that_are_slower_are_not_used(weights: CudaWeights) -> None:
    said = trials.fp8_products(weights, seconds(2e-6))
    number = len({one.shape for one in weights.packed})
    assert said == f"torch takes {2 * number} µs for what takes kernels {number} µs"


@pytest.mark.parametrize("wrong", [1.02, torch.nan])
def test_products_that_are_wrong_are_not_used(
    weights: CudaWeights, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *given, **named: wrong * right(*given, **named))
    said = trials.fp8_products(weights, seconds(0))
    assert said.startswith("products would differ by ")


def test_a_model_without_matrices_in_fp8_has_none_to_use() -> None:
    plain = CudaWeights(model_of(config_of("llama")).decoder, dtype=torch.bfloat16, device=CPU)
    assert trials.fp8_products(plain) == "the model has no matrices in FP8 with one scale for each row"


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_chunks_of_tokens_are_used_if_they_are_right_and_faster(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = model_of(config_of(family)).decoder.layers
    for taken, said in ((0.9e-6, ""), (2e-6, "torch takes 2 µs for what takes kernels 1 µs")):
        clock: Any = lambda run, taken=taken: 1e-6 if run.func is triton_states.recurrence else taken  # noqa: E731
        assert trials.state_chunks(layers, CPU, clock) == said
    right = chunked_states.chunked
    monkeypatch.setattr(trials, "chunked", lambda *given: 1.01 * right(*given))
    assert trials.state_chunks(layers, CPU, clock).startswith("outputs would differ by 1.0%")
    monkeypatch.setattr(trials, "chunked", lambda state, *given: right(state.clone(), *given))
    assert trials.state_chunks(layers, CPU, clock).startswith("states would differ by ")


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_a_model_without_recurrences_has_none_to_use(family: str) -> None:
    layers = model_of(config_of(family)).decoder.layers
    assert trials.state_chunks(layers, CPU) == "no layer of the model has a state that prompts walk through"


def test_an_error_is_a_reason(weights: CudaWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any, **__: Any) -> Any:
        raise RuntimeError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0")

    monkeypatch.setattr(torch, "_scaled_mm", unsupported)
    said = trials.reason(lambda: trials.fp8_products(weights))
    assert said == "RuntimeError: torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0"
