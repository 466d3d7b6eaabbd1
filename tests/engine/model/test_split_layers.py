"""Fused layers, and packed weights, of a model that is split over two processes compute what the whole model does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oaiserve.engine.model.checkpoints.integer_layouts import Integers, part_of
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.start.load import load_model
from tests.engine.model import members
from tests.engine.model.cpu.small_models import GROUPED_MOE, LATENT, MOE, config, make_model
from tests.engine.model.gpu.packed_matrices import SIZES as TWO_LAYERS
from tests.engine.model.gpu.packed_matrices import floats_in_blocks, integers
from tests.engine.model.members import LENGTHS, NUM_BLOCKS, Computed
from tests.engine.model.steps import BLOCK_SIZE, logits_of
from tests.models.packed import Packing, write_checkpoint, write_fp8

pytest.importorskip("triton", reason="Triton has no wheels for this system")

# exp of a large number is infinity, and the activation is the number itself, which is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

ROOT = Path(__file__).parents[3]
SIZES = {**TWO_LAYERS, "num_hidden_layers": 1, "vocab_size": 96}
# GPTQ's matrices in any order are cut along their rows alone. The experts of a layer are one.
NUM_PACKED = {"fp8": 7, "gptq": 5, "phi3": 4, "olmoe": 5, "deepseek": 0, "llama4": 0, "awq": 7}
# The first makes keys from latent vectors, and transformers' hooks split the second.
IS_NOT_FUSED = {"deepseek", "llama4"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return checkpoints of models of which one has biases, one its queries, keys and values in one matrix, one experts
    and norms of all heads, and one norms of heads and its embedding as its head."""
    root = tmp_path_factory.mktemp("split")
    write_fp8(root / "fp8", make_model(config("llama", **SIZES)), "blocks")
    gptq = Packing("gptq", bits=8, group_size=32, has_act_order=True)
    write_checkpoint(root / "gptq", make_model(config("qwen2", **SIZES)), gptq)
    write_fp8(root / "phi3", make_model(config("phi3", **SIZES)), "blocks")
    write_checkpoint(root / "olmoe", make_model(config("olmoe", **{**MOE, **SIZES})), Packing("awq"))
    latent = {**LATENT, **GROUPED_MOE, "num_experts_per_tok": 3, "q_lora_rank": None, "vocab_size": 96}
    make_model(config("deepseek_v2", **latent)).save_pretrained(root / "deepseek")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size_mlp": 64}
    make_model(config("llama4_text", **SIZES, **experts)).save_pretrained(root / "llama4")
    changes = {"tie_word_embeddings": True, "pad_token_id": 95}  # a row that the first member does not have
    write_checkpoint(root / "awq", make_model(config("qwen3", **SIZES, **changes)), Packing("awq"))
    return [root / name for name in NUM_PACKED]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[list[torch.Tensor]]:
    found = []
    for folder in (*folders, folders[-1]):
        loaded = load_model(folder, device="cpu", dtype="float32")
        eager = EagerExecutor.with_cache(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        found.append(logits_of(eager, LENGTHS, loaded.vocab_size))
    return found


@pytest.fixture(scope="module")
def of_members(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[list[Computed]]:
    """Return what each member has computed. This process is the first one."""
    store = tmp_path_factory.mktemp("store")
    file, num_threads = store / "found", torch.get_num_threads()
    command = [sys.executable, "-m", "tests.engine.model.members", "1", store, file, *folders]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}) as other:
        try:
            found = members.of_all(0, store, folders)
        finally:
            other.wait(60)
            torch.set_num_threads(num_threads)
    assert other.returncode == 0
    return [found, [Computed(*one) for one in torch.load(file)]]


def test_members_compute_the_logits_of_the_whole_model(
    of_members: list[list[Computed]], expected: list[list[torch.Tensor]]
) -> None:
    for of_member in of_members:
        assert len(of_member) == len(expected)
        for name, found, want in zip((*NUM_PACKED, "fails"), of_member, expected, strict=True):
            assert found.is_fused == (name not in IS_NOT_FUSED), name
            for one, other in zip(found.logits, want, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
                )
        assert [found.num_packed for found in of_member[:-1]] == [*NUM_PACKED.values()]


def test_a_way_that_fails_at_one_member_is_off_at_all(of_members: list[list[Computed]]) -> None:
    for *_, before, last in of_members:
        assert before.multiplies_by == "multiply"
        assert last.multiplies_by == "expanded_product"


@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("dimension", [0, 1])
def test_parts_of_a_matrix_are_those_of_its_weights(dimension: int, number: int) -> None:
    matrices = [
        integers(4, 64, 128, 32, zeros=True),
        integers(8, 64, 128, 64, zeros=False),
        integers(4, 64, 128, 128, zeros=True),
        floats_in_blocks(64, 128, (32, 32)),
        floats_in_blocks(64, 128, None),
    ]
    for matrix in matrices:
        parts = [part_of(matrix, dimension, index, number) for index in range(number)]
        found = torch.cat([part.expand() for part in parts if part is not None], dim=dimension)
        assert torch.equal(found, matrix.expand())


def test_segments_of_rows_are_cut_one_by_one() -> None:
    for matrix in (integers(4, 48, 128, 32, zeros=True), floats_in_blocks(48, 128, (16, 32))):
        found = part_of(matrix, 0, 1, 2, segments=(32, 16))
        assert torch.equal(found.expand(), torch.cat([matrix.expand()[16:32], matrix.expand()[40:]]))


def test_parts_without_whole_groups_are_none() -> None:
    assert part_of(integers(4, 64, 96, 32, zeros=True), 1, 0, 2) is None
    assert part_of(integers(4, 64, 128, 32, zeros=True, any_order=True), 1, 0, 2) is None
    in_order = part_of(integers(4, 64, 128, 32, zeros=True, any_order=True), 0, 1, 2)
    assert isinstance(in_order, Integers)
    assert in_order.columns is not None
