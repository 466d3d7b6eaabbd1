"""Products in floats of eight bits: torch's are those of rounded rows in float32, and near those of the rows."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import ScalingType

from oaiserve.engine.decoder.description import Norm
from oaiserve.engine.model.attention import FP8
from oaiserve.engine.start.compare import FLOAT8_TOLERANCE, difference
from oaiserve.plugins.cuda.executor import device_matrices, place
from oaiserve.plugins.cuda.executor.device_matrices import in_float8, rounded_product
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.kernels import Kernels, triton_kernels
from oaiserve.plugins.cuda.executor.product_ways import ProductWays
from tests.engine.model.steps import CPU
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.packed_matrices import floats_in_blocks, in_blocks_of_128, numbers, relative
from tests.plugins.cuda.executor.step_runs import model_of
from tests.plugins.cuda.executor.test_executor import batch_with, on_cpu, on_weights
from tests.plugins.cuda.executor.test_packed import FILES, described, prompt_of

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.plugins.cuda.executor import triton_layers, triton_products

pytestmark = pytest.mark.kernels

ROWS = 65
ROUNDED = ProductWays(rounded_from=ROWS)
MATRIX = device_matrices.of_integers(floats_in_blocks(64, 96, None))


def most_rounding(x: torch.Tensor) -> torch.Tensor:
    """Return by how much rounding may move each number of rows, as `rounded_product` states it, and float32's share."""
    largest = x.abs().amax(1, keepdim=True)
    return torch.maximum(x.abs() / 16, largest / 448 / 1024) * (1 + 1e-5)


def uneven(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    """Return rows of very different sizes, whose numbers are, too."""
    x = numbers(rows, columns, seed=seed)
    return x**3 * torch.logspace(-6, 6, rows)[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_rounds_rows_as_plain_torch_does(dtype: torch.dtype) -> None:
    x = uneven(20, 70).clamp(-60_000, 60_000).to(dtype)
    x[3] = 0
    codes, scales, _ = triton_products.rounded_rows(x)
    expected, expected_scales = device_matrices.rounded_rows(x)
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    assert torch.equal(codes.float(), expected.float())
    assert float(codes.float().abs().max()) == 448
    assert bool((codes[3].float() == 0).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity times 0
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_become_nan(wrong: float) -> None:
    x = numbers(ROWS, 96).bfloat16()
    x[5, 7] = wrong
    for out in (triton_products.multiply(x, MATRIX, None, ROUNDED), rounded_product(x, MATRIX, None)):
        are_nan = out.isnan()
        assert bool(are_nan[5].all())
        assert int(are_nan.sum()) == 64


def test_rounding_moves_numbers_and_products_no_further_than_stated() -> None:
    x = uneven(ROWS, 96)
    codes, scales = device_matrices.rounded_rows(x)
    moved = (codes.float() * scales - x).abs()
    assert bool((moved <= most_rounding(x)).all())
    assert float((moved / most_rounding(x)).max()) > 0.9
    weights = MATRIX.expand(torch.float32)
    apart = (rounded_product(x, MATRIX, None).double() - x.double() @ weights.T.double()).abs()
    assert bool((apart <= most_rounding(x).double() @ weights.T.abs().double() * (1 + 1e-5)).all())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4), (torch.float32, 1e-6)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_torch_are_those_of_rounded_rows(dtype: torch.dtype, limit: float, has_bias: bool) -> None:
    x = numbers(ROWS, 96, seed=1).to(dtype)
    bias = numbers(64, seed=2).to(dtype) if has_bias else None
    out = triton_products.multiply(x, MATRIX, bias, ROUNDED)
    assert out.dtype == dtype
    assert relative(out.float(), rounded_product(x, MATRIX, bias)) < limit


@pytest.mark.parametrize("name", ["few rows", "scales of small blocks", "a height of 70"])
def test_other_products_are_multiplied_in_16_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = MATRIX
    if name != "few rows":
        shape = (64, 256, (64, 128)) if name == "scales of small blocks" else (70, 96, None)
        matrix = device_matrices.of_integers(floats_in_blocks(*shape))
    monkeypatch.setattr(torch, "_scaled_mm", None)
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", None)
    x = numbers(ROWS - (name == "few rows"), matrix.shape[1]).bfloat16()
    assert torch.equal(triton_products.multiply(x, matrix, None, ROUNDED), triton_products.multiply(x, matrix, None))


def scaled_mm_of_hopper(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    recipe_a: ScalingType,
    scale_b: torch.Tensor,
    recipe_b: ScalingType,
    *,
    output_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Compute torch's product with scales of blocks, which CPUs don't have. It takes the layouts that torch takes on
    Hopper cards."""
    assert (recipe_a, recipe_b) == (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128)
    m, k = a.shape
    n = b.shape[1]
    assert m % 4 == 0
    assert (a.stride(), b.stride()) == ((k, 1), (1, k))
    groups = -(-k // 128)
    in_fours = -(-groups // 4) * 4
    assert (scale_a.shape, scale_a.stride()) == ((m, groups), (1, m))
    assert (scale_b.shape, scale_b.stride()) == ((in_fours, -(-n // 128)), (1, in_fours))
    whole_a = a.float() * scale_a.repeat_interleave(128, 1)[:, :k]
    whole_b = b.float() * scale_b[:groups].repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    return (whole_a @ whole_b).to(output_dtype)


BLOCKS = device_matrices.of_integers(floats_in_blocks(256, 640, (128, 128)))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_with_blocks_of_scales_are_those_of_rounded_groups(
    has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm_of_hopper)
    x = uneven(ROWS, 640).bfloat16()
    bias = numbers(256, seed=2).bfloat16() if has_bias else None
    out = triton_products.multiply(x, BLOCKS, bias, ROUNDED)
    assert (out.shape, out.dtype) == ((ROWS, 256), torch.bfloat16)
    assert relative(out.float(), rounded_product(x, BLOCKS, bias)) < 4e-3
    assert 0.01 < relative(out.float(), device_matrices.expanded_product(x, BLOCKS, bias).float()) < 0.1


def test_the_kernel_rounds_groups_as_plain_torch_does() -> None:
    x = uneven(20, 384).clamp(-60_000, 60_000).bfloat16()
    x[3] = 0
    x[5, 130] = torch.nan
    codes, scales, _ = triton_products.rounded_rows(x[:19], 128)
    assert (codes.shape, scales.shape, scales.stride()) == ((20, 384), (20, 3), (1, 20))
    expected, expected_scales = device_matrices.rounded_rows(x[:19], 128)
    torch.testing.assert_close(scales[:19], expected_scales, rtol=1e-6, atol=0, equal_nan=True)
    is_number = ~expected.float().isnan()
    assert torch.equal(codes[:19].float()[is_number], expected.float()[is_number])
    assert scales.isnan().nonzero().tolist() == [[5, 1]]


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("columns", [384, 1024])
def test_norms_round_their_results_as_rows_are_rounded(group: int, columns: int) -> None:
    hidden = uneven(5, columns).bfloat16()
    norm = Norm(numbers(columns, seed=1), None, 1e-6, False)
    rounded = device_matrices.new_rounded(5, columns, group, CPU)
    _, x = triton_layers.add_and_norm(hidden, (), None, norm, 1.0, rounded)
    assert torch.equal(x, triton_layers.add_and_norm(hidden, (), None, norm)[1])
    assert_rounded(rounded, x)


@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply")  # infinity times 0
def test_activations_round_their_results_as_rows_are_rounded() -> None:
    products = numbers(5, 2 * 1280).bfloat16()
    products[2, 7] = torch.inf
    rounded = device_matrices.new_rounded(5, 1280, 128, CPU)
    inner = triton_layers.activate(products, "silu", is_gated=True, rounded=rounded)
    assert_rounded(rounded, inner)
    assert rounded.scales[:5].isnan().nonzero().tolist() == [[2, 0]]


def assert_rounded(rounded: device_matrices.Rounded, x: torch.Tensor) -> None:
    expected = triton_products.rounded_rows(x, rounded.group)
    assert torch.equal(rounded.codes[: len(x)].view(torch.uint8), expected.codes[: len(x)].view(torch.uint8))
    torch.testing.assert_close(rounded.scales[: len(x)], expected.scales[: len(x)], rtol=0, atol=0, equal_nan=True)


@torch.inference_mode()
def test_layers_round_their_inputs_for_products_with_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm_of_hopper)
    monkeypatch.setattr(place, "in_float8", in_blocks_of_128)
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16, "num_hidden_layers": 2}
    model = model_of(config_of("llama", hidden_size=128, intermediate_size=256, **sizes))
    weights = CudaWeights(model.decoder, dtype=torch.float32, device=CPU, in_float8=True)
    ways = ProductWays(rounded_from=20)
    batches = (batch_with(model.spec, [([*range(5, 26)], 0)]) for _ in range(2))
    of_kernels, rounded = (
        on_weights(weights, model.decoder, kernels=kernels).forward(batch)
        for kernels, batch in zip((triton_kernels()._replace(ways=ways), Kernels(ways=ways)), batches, strict=True)
    )
    assert difference(of_kernels, rounded) < 0.03  # Few numbers round to the other neighbour.


def test_joined_matrices_keep_their_blocks() -> None:
    both = device_matrices.joined([BLOCKS, BLOCKS])
    assert both is not None
    assert both.block_scales is not None
    assert both.block_scales.shape == (4, 8)
    other = device_matrices.of_integers(floats_in_blocks(200, 640, (128, 128)))
    assert other.block_scales is None
    assert device_matrices.joined([BLOCKS, other]).block_scales is None


def test_weights_become_floats_with_a_scale_for_each_row() -> None:
    weights = uneven(48, 64)
    matrix = in_float8(weights.T.contiguous().T)  # as families with transposed matrices have them
    assert matrix.is_for_torch
    assert matrix.rounded_columns == 0
    assert (matrix.codes.dtype, matrix.codes.is_contiguous(), matrix.scales.shape) == (FP8, True, (1, 48))
    assert bool(((matrix.expand(torch.float32) - weights).abs() <= most_rounding(weights)).all())
    assert in_float8(numbers(48, 80)) is None  # kernels read 32 columns at a time


@torch.inference_mode()
def test_prompts_of_a_checkpoint_in_fp8_are_multiplied_in_fp8(tmp_path: Path) -> None:
    ways = ProductWays(rounded_from=20)
    found = described(FILES["fp8 by row"][0](tmp_path))
    of_kernels, rounded, expanded = (
        on_cpu(found.decoder, kernels=kernels).forward(prompt_of(found))
        for kernels in (triton_kernels()._replace(ways=ways), Kernels(ways=ways), Kernels())
    )
    assert difference(of_kernels, rounded) < 0.03  # Few numbers round to the other neighbour.
    assert 0.03 < difference(rounded, expanded) < FLOAT8_TOLERANCE / 2


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "bamba", "gpt2"])
@torch.inference_mode()
def test_matrices_are_quantized_where_they_are_placed(family: str) -> None:
    model = model_of(config_of(family, **EXPERTS if family == "qwen3_moe" else {}))
    weights = CudaWeights(model.decoder, dtype=torch.float32, device=CPU, in_float8=True)
    plain = CudaWeights(model.decoder, dtype=torch.float32, device=CPU)
    assert {one.kind for one in weights.packed} == {"float8"}
    assert weights.num_bytes < plain.num_bytes / 2
    batches = (batch_with(model.spec, [([*range(5, 26)], 0)]) for _ in range(2))
    logits, expected = (
        on_weights(one, model.decoder).forward(batch) for one, batch in zip((weights, plain), batches, strict=True)
    )
    assert 0.001 < difference(logits, expected) < FLOAT8_TOLERANCE
