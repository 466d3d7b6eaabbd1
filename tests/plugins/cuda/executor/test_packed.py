"""Quantized weights stay in their blocks on a GPU, and give the logits of the expanded ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.sources.integer_layouts import Integers
from oaiserve.engine.decoder.sources.unread_matrix import UnreadMatrix
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.plugins.cuda.executor import packed
from oaiserve.plugins.cuda.executor.executor import CudaWeights
from oaiserve.plugins.cuda.executor.kernels import triton_kernels
from tests.engine.executors.fake_gpu import GPU
from tests.engine.executors.native.small_models import EXPERTS, MOE, config, make_model
from tests.engine.executors.test_reference_steps import reference
from tests.engine.model.steps import CPU
from tests.models.in_blocks import SIZES, batch_of, file_of, written
from tests.models.packed import Packing, save_in_mxfp4, write_fp8
from tests.models.small_sizes import HEADS_FOR_EACH
from tests.plugins.cuda.executor.packed_matrices import integers
from tests.plugins.cuda.executor.test_executor import on_cpu, on_weights

WIDTHS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}


def mixture(folder: Path, family: str, packing: Packing, **changes: Any) -> Path:
    written(folder, packing, family, **changes)
    return folder


def fp8(folder: Path, layout: Any) -> Path:
    write_fp8(folder, make_model(config("llama", **SIZES)), layout)
    return folder


def in_mxfp4(folder: Path) -> Path:
    sizes = {**WIDTHS, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": None}
    save_in_mxfp4(make_model(config("gpt_oss", **sizes)), folder)
    return folder


def gguf(folder: Path, kind: Kind) -> Path:
    return file_of(config("llama", **WIDTHS), folder, {}, kind)


# By name: what writes the files into a folder, and the kinds of matrices, and of those of experts, on the device.
FILES: dict[str, tuple[Callable[[Path], Path], set[str]]] = {
    "awq": (lambda folder: mixture(folder, "llama", Packing("awq")), {"int4"}),
    "gptq in any order": (lambda folder: mixture(folder, "qwen2", Packing("gptq", has_act_order=True)), {"int4"}),
    "gptq in 8 bits": (lambda folder: mixture(folder, "llama", Packing("gptq_v2", bits=8)), {"int8"}),
    "sorted by head": (
        lambda folder: mixture(folder, "gpt_neox", Packing("gptq", has_act_order=True), **HEADS_FOR_EACH),
        {"int4"},
    ),
    "compressed-tensors": (lambda folder: mixture(folder, "qwen2", Packing("pack-quantized")), {"int4"}),
    "by row": (
        lambda folder: mixture(folder, "llama", Packing("int-quantized", bits=8, group_size=-1, is_symmetric=True)),
        {"int8"},
    ),
    "fp8 in blocks": (lambda folder: fp8(folder, "blocks"), {"float8"}),
    "fp8 by row": (lambda folder: fp8(folder, "compressed"), {"float8"}),
    "experts": (
        lambda folder: mixture(folder, "qwen3_moe", Packing("awq"), **{**MOE, "moe_intermediate_size": 64}),
        {"int4"},
    ),
    "experts in 8 bits": (
        lambda folder: mixture(folder, "mixtral", Packing("gptq", bits=8, expert_names=("w1", "w3", "w2")), **EXPERTS),
        {"int8"},
    ),
    "mxfp4": (in_mxfp4, {"mxfp4"}),
    "Q8_0": (lambda folder: gguf(folder, Kind.Q8_0), {"int8"}),
    "Q4_0": (lambda folder: gguf(folder, Kind.Q4_0), {"int4"}),
    "Q5_1, which no kernel reads": (lambda folder: gguf(folder, Kind.Q5_1), set()),
}


def described(path: Path) -> Described:
    """Describe files as for a GPU, in float32."""
    return describe_model(find_model(path), EngineOptions(dtype="float32", max_model_len=128), device=GPU)


def prompt_of(found: Described) -> Batch:
    batch = batch_of(21, found.spec.vocab_size)
    batch.logits_rows = torch.arange(21)
    return batch


@pytest.mark.parametrize("name", FILES)
@torch.inference_mode()
def test_logits_are_those_of_expanded_weights(name: str, tmp_path: Path) -> None:
    write, kinds = FILES[name]
    found = described(write(tmp_path))
    weights = CudaWeights(found.decoder, dtype=torch.float32, device=CPU)
    assert {one.kind for one in weights.packed} == kinds
    expected = reference(found.decoder).forward(prompt_of(found))
    assert difference(on_weights(weights, found.decoder).forward(prompt_of(found)), expected) < 1e-5


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the activation is still right
@pytest.mark.parametrize("name", ["awq", "gptq in any order", "fp8 in blocks", "experts", "mxfp4", "Q8_0"])
@torch.inference_mode()
def test_kernels_give_the_logits_of_expanded_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    found = described(FILES[name][0](tmp_path))
    expected = reference(found.decoder).forward(prompt_of(found))
    assert difference(on_cpu(found.decoder, kernels=triton_kernels()).forward(prompt_of(found)), expected) < 1e-4


@torch.inference_mode()
def test_matrices_in_4_bits_take_a_fifth_of_the_memory(tmp_path: Path) -> None:
    found = described(FILES["awq"][0](tmp_path))
    weights = CudaWeights(found.decoder, dtype=torch.float32, device=CPU)
    matrices = weights.packed
    assert weights.largest_packed == max(one.shape[0] * one.shape[1] for one in matrices)
    # For 32 weights, 16 bytes of codes, 2 of a scale and 1 of a zero.
    assert sum(one.nbytes for one in matrices) == sum(one.shape[0] * one.shape[1] * 19 // 32 for one in matrices)


def test_a_matrix_is_read_when_it_is_placed_and_its_rows_may_be_chosen() -> None:
    whole = integers(4, 70, 128, 32, zeros=True)
    reads = []

    def read() -> Integers:
        reads.append(1)
        return whole

    matrix = UnreadMatrix.of((70, 128), read)
    chosen = matrix[torch.tensor([5, 3, 69]).numpy()]
    assert (matrix.shape, chosen.shape, len(chosen), matrix.nbytes) == ((70, 128), (3, 128), 3, 0)
    assert not reads
    torch.testing.assert_close(chosen.expand(), whole.expand()[[5, 3, 69]])
    assert len(reads) == 1


@torch.inference_mode()
def test_floats_of_eight_bits_are_expanded_where_a_gpu_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = described(FILES["fp8 by row"][0](tmp_path))
    matrix = found.decoder.layers[0].attention.out.weight
    assert packed.packed(matrix, CPU).kind == "float8"
    monkeypatch.setattr(packed, "takes_float8", lambda device: False)
    weights = CudaWeights(found.decoder, dtype=torch.float32, device=CPU)
    assert weights.packed == []
    assert packed.packed(matrix, CPU) is None
