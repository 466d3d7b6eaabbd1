"""Quantized checkpoints are described from their files as transformers' modules with expanded weights are."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.quantization import read_quantization
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import Decoder, matrices_in
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.executors.native.library import Library
from tests.engine.executors.native.small_models import config, make_model
from tests.models.described import described
from tests.models.fingerprints import text_of
from tests.models.in_blocks import SIZES, with_expanded_blocks, written
from tests.models.packed import Fp8Layout, Packing, write_fp8
from tests.models.small_sizes import HEADS_FOR_EACH

pytestmark = pytest.mark.compiler
PACKINGS = {
    "awq": Packing("awq"),
    "gptq": Packing("gptq", has_act_order=True),
    "gptq_v2": Packing("gptq_v2", bits=8),
    "pack-quantized": Packing("pack-quantized", scales=torch.bfloat16),
    "int-quantized": Packing("int-quantized", bits=8, group_size=-1, is_symmetric=True),
}


def decoder_of(folder: Path, files: TensorFiles, length: int, dtype: torch.dtype = torch.float32) -> Decoder:
    settings = settings_of(json.loads((folder / "config.json").read_text()))
    family = FAMILIES[settings["model_type"]]
    tensors = HubTensors(files, family.names, dtype, has_transposed_experts=family.has_transposed_experts)
    with torch.inference_mode():
        return describe(tensors, settings, family, length)


def packed_files(folder: Path) -> PackedWeights:
    quantization = read_quantization(json.loads((folder / "config.json").read_text()))
    assert quantization is not None
    return PackedWeights(Checkpoint(folder), quantization, is_long=Library(torch.float32).has_integer_tiles())


def assert_as_modules(folder: Path, files: TensorFiles, model: PreTrainedModel) -> None:
    """Compare the description of files, with blocks expanded, with that of a model that has their numbers."""
    expected = described(model)
    found = decoder_of(folder, files, expected.max_model_len, expected.dtype)
    assert text_of(with_expanded_blocks(found)) == text_of(expected.decoder)


@pytest.mark.parametrize("layout", PACKINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_packed_integers_are_described_as_modules_are(layout: str, family: str, tmp_path: Path) -> None:
    model = written(tmp_path, PACKINGS[layout], family)
    assert_as_modules(tmp_path, packed_files(tmp_path), model)


def test_biases_of_zeros_and_the_head_of_a_tied_model_are_left_out(tmp_path: Path) -> None:
    model = written(tmp_path, PACKINGS["awq"], tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    tensors |= {f"{name}.bias": torch.zeros(tensors[f"{name}.scales"].shape[1]) for name in modules}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_as_modules(tmp_path, packed_files(tmp_path), model)


def test_rows_sorted_by_head_stay_in_blocks_of_a_file_as_quantizers_write_it(tmp_path: Path) -> None:
    written(tmp_path, PACKINGS["gptq"], "gpt_neox", **HEADS_FOR_EACH)
    expected = decoder_of(tmp_path, packed_files(tmp_path), 128)
    assert all(isinstance(matrix.weight, Blocks) for matrix in matrices_in(expected.layers))
    path = tmp_path / "model.safetensors"
    tensors = {name.replace("lm_head.", "embed_out."): tensor for name, tensor in load_file(path).items()}
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, path)
    assert text_of(decoder_of(tmp_path, packed_files(tmp_path), 128)) == text_of(expected)


@pytest.mark.parametrize("layout", get_args(Fp8Layout))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_of_8_bits_are_expanded_as_modules_have_them(
    layout: Fp8Layout, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = make_model(config("llama", **SIZES))
    write_fp8(tmp_path, model, layout)
    assert_as_modules(tmp_path, packed_files(tmp_path), model.to(dtype))


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_packed_experts_stay_in_blocks_of_the_same_numbers(layout: str, tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    model = written(tmp_path, PACKINGS[layout], "qwen3_moe", **sizes)
    assert_as_modules(tmp_path, packed_files(tmp_path), model)
    matrices = matrices_in(decoder_of(tmp_path, packed_files(tmp_path), 128).layers)
    in_blocks = sum(isinstance(one.weight, Blocks) for one in matrices)
    assert in_blocks == SIZES["num_hidden_layers"] * (4 + 3 * 4)  # matrices of attention and of experts
