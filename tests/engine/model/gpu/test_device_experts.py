"""Experts that stay packed on a GPU: what the kernels compute, in Triton's interpreter, is what plain torch does."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.gpu.device_experts import (
    ExpertMatrices,
    PackedExperts,
    mxfp4,
    packed_experts,
    plain_experts,
    stacked,
)
from oaiserve.engine.model.gpu.device_matrices import of_integers
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor, FusedLayers
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start import load
from oaiserve.engine.start.gpu import products
from oaiserve.engine.start.gpu.layers import described
from oaiserve.engine.start.gpu.products import compute_experts_checked
from oaiserve.engine.start.gpu.trials import Trials
from oaiserve.engine.start.load import load_model
from tests.engine.model.cpu.small_models import EXPERTS, MOE, config, make_model
from tests.engine.model.gpu.packed_matrices import SIZES, Gating, floats_in_blocks, integers, numbers, relative
from tests.engine.model.steps import BLOCK_SIZE, logits_of
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint

pytest.importorskip("triton", reason="Triton has no wheels for this system")

from oaiserve.engine.model.gpu import triton_experts, triton_matrices

# exp of a large number is infinity, and the activation is the number itself, which is right.
pytestmark = [pytest.mark.kernels, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]

NUM_EXPERTS, WIDTH, INNER = 5, 64, 96


def in_mxfp4(n: int, columns: int, seed: int) -> ExpertMatrices:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (NUM_EXPERTS, n, columns // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 124, (NUM_EXPERTS, n, columns // 32), generator=generator).to(torch.uint8)
    return mxfp4(blocks, scales, numbers(NUM_EXPERTS, n, seed=seed))


def packed(kind: str, n: int, columns: int, seed: int) -> ExpertMatrices:
    if kind == "mxfp4":
        return in_mxfp4(n, columns, seed)
    made = {
        "int4": lambda: integers(4, n, columns, 32, zeros=True),
        "int8": lambda: integers(8, n, columns, 32, zeros=False),
        "float8": lambda: floats_in_blocks(n, columns, None),
    }
    return stacked([of_integers(made[kind]()) for _ in range(NUM_EXPERTS)])


def doubled(*arguments: Any) -> torch.Tensor:
    return 2 * plain_experts(*arguments)


@pytest.mark.parametrize("kind", ["mxfp4", "int4", "int8", "float8"])
def test_experts_of_the_kernels_are_those_of_plain_torch(kind: str) -> None:
    inner = 128 if kind == "mxfp4" else INNER
    experts = PackedExperts(Gating(kind), packed(kind, 2 * inner, WIDTH, 1), packed(kind, WIDTH, inner, 2))
    assert experts.activation == ("clamped" if kind == "mxfp4" else "silu")
    for num_rows, dtype in ((1, torch.float32), (23, torch.bfloat16)):
        generator = torch.Generator().manual_seed(num_rows)
        x = torch.randn(num_rows, WIDTH, generator=generator).to(dtype)
        chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1, generator=generator)[:2] for _ in range(num_rows)])
        weights = torch.rand(num_rows, 2, generator=generator).to(dtype)
        want = plain_experts(experts, x.float(), chosen, weights.float())
        found = triton_experts.compute(experts, x, chosen, weights).float()
        assert relative(found, want) < (1e-5 if dtype == torch.float32 else 2e-2)


def test_columns_of_experts_are_split_for_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = PackedExperts(Gating("mxfp4"), in_mxfp4(256, 256, 1), in_mxfp4(256, 128, 2))
    given = numbers(2, 256), torch.tensor([[0, 3], [3, 1]]), torch.rand(2, 2)
    want = triton_experts.compute(experts, *given)
    monkeypatch.setattr(triton_matrices, "_num_multiprocessors", lambda device: 16)
    for _ in range(2):  # the counters are as they were
        torch.testing.assert_close(triton_experts.compute(experts, *given), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_rows_are_sorted_by_expert_and_cut_into_tiles(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(7, (num_rows, 3), generator=generator)
    chosen[chosen == 4] = 6  # which has none
    order, tile_expert, tile_first, tile_end, tiles = triton_experts.planned(chosen, 7)
    pairs = chosen.flatten()
    assert order.tolist() == pairs.argsort(stable=True).tolist()
    found = [
        (expert, first, end)
        for expert, first, end in zip(*(one.tolist() for one in (tile_expert, tile_first, tile_end)), strict=True)
        if expert >= 0
    ]
    wanted, begin = [], 0
    for expert, count in enumerate(pairs.bincount(minlength=7).tolist()):
        wanted += [(expert, first, begin + count) for first in range(begin, begin + count, tiles.rows)]
        begin += count
    assert found == wanted
    assert begin == 3 * num_rows


def test_experts_that_are_stored_in_different_ways_are_not_stacked() -> None:
    assert stacked([of_integers(integers(bits, 8, 128, 32, zeros=True)) for bits in (4, 8)]) is None
    assert stacked([of_integers(integers(4, 8, 128, 32, zeros=True, any_order=True))] * 2) is None
    blocks = torch.zeros(2, 8, 3, 16, dtype=torch.uint8)
    assert mxfp4(blocks, blocks[..., 0], None) is None  # 96 columns


def test_a_way_to_combine_that_is_not_known_is_the_modules_own() -> None:
    module = SimpleNamespace(is_concatenated=True, _apply_gate=lambda both: both.chunk(2, dim=-1)[0].sin())
    experts = PackedExperts(module, packed("int8", 2 * INNER, WIDTH, 1), packed("int8", WIDTH, INNER, 2))
    assert experts.activation is None
    x, chosen, weights = numbers(3, WIDTH), torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    found = triton_experts.compute(experts, x, chosen, weights)
    torch.testing.assert_close(found, plain_experts(experts, x, chosen, weights), rtol=1e-4, atol=1e-4)


# -- checkpoints ------------------------------------------------------------------------------------------------------

NUM_BLOCKS, LENGTHS = 8, [3, 17]
MIXTURES = {
    "gpt_oss": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None},
    "qwen3_moe": {**SIZES, **MOE, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {**SIZES, **EXPERTS},
}


def checkpoint(folder: Path, family: str) -> None:
    model = make_model(config(family, **MIXTURES[family]))
    if family == "gpt_oss":
        save_in_mxfp4(model, folder)
    elif family == "mixtral":
        write_checkpoint(folder, model, Packing("gptq", bits=8, expert_names=("w1", "w3", "w2")))
    else:
        write_checkpoint(folder, model, Packing("awq"))


def logits(loaded: LoadedModel) -> list[torch.Tensor]:
    eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return logits_of(eager, LENGTHS, loaded.vocab_size)


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_experts_of_a_checkpoint_stay_packed(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, family)
    want = logits(load_model(tmp_path, device="cpu", dtype="float32"))
    monkeypatch.setattr(load, "_keeps_packed", lambda device: True)
    loaded = load_model(tmp_path, device="cpu", dtype="float32")
    layers = packed_experts(loaded.model)
    assert len(layers) == 2
    assert sum(one.numel() for one in loaded.model.parameters() if one.dim() == 3) == 0
    for one, other in zip(logits(loaded), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(products, "PRODUCT_ROWS", (1, 3))
    assert compute_experts_checked(loaded, lambda: triton_experts.compute, Trials())
    fused = FusedLayers(loaded, described(loaded, BLOCK_SIZE), layer_operations)
    eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    executor = FusedExecutor(fused, eager.caches, ReferenceAttention)
    for found, other in zip(logits_of(executor, LENGTHS, loaded.vocab_size), want, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-3, atol=1e-3)
    loaded.model.to("meta")
    assert layers[0].down.codes.device.type == "meta"


@torch.inference_mode()
def test_experts_that_are_wrong_are_switched_off_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint(tmp_path, "gpt_oss")
    monkeypatch.setattr(load, "_keeps_packed", lambda device: True)
    loaded = load_model(tmp_path, device="cpu", dtype="float32")

    assert not compute_experts_checked(loaded, lambda: doubled, Trials())
    assert "Packed experts by kernels: off" in caplog.text
    assert packed_experts(loaded.model)[0].compute is plain_experts
