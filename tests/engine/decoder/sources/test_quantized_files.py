"""Quantized checkpoints are described from their files alone as they are by way of transformers' modules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import Decoder, matrices_in
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.encoded_weights import EncodedWeights
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from oaiserve.engine.model.cpu.encoder import Encoder
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.ways.quantized import load_quantized
from oaiserve.files.quantization import read_quantization
from oaiserve.files.source import find_model
from tests.engine.model.cpu.small_models import config, make_model
from tests.engine.model.cpu.small_models import described as described_by_modules
from tests.engine.remembered import save
from tests.models.fingerprints import fingerprint, text_of
from tests.models.in_blocks import OPTIONS, SIZES, WIDE, written
from tests.models.packed import Fp8Layout, Packing, save_in_mxfp4, write_fp8

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
    return PackedWeights(folder, quantization, is_long=Library(torch.float32).has_integer_tiles())


def assert_as_before(folder: Path, files: TensorFiles, **options: Any) -> None:
    """Compare the description of files with that of today's start."""
    kept = load_quantized(find_model(folder), replace(OPTIONS, **options))
    found = decoder_of(folder, files, kept.loaded.max_model_len, kept.loaded.dtype)
    assert fingerprint(kept.decoder, kept.loaded).endswith(f"\n{text_of(found)}")


@pytest.mark.parametrize("layout", PACKINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_integers_are_described_as_before(layout: str, family: str, dtype: str, tmp_path: Path) -> None:
    written(tmp_path, PACKINGS[layout], family)
    assert_as_before(tmp_path, packed_files(tmp_path), dtype=dtype)


def test_biases_of_zeros_and_the_head_of_a_tied_model_are_left_out(tmp_path: Path) -> None:
    written(tmp_path, PACKINGS["awq"], tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    tensors |= {f"{name}.bias": torch.zeros(tensors[f"{name}.scales"].shape[1]) for name in modules}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_as_before(tmp_path, packed_files(tmp_path))


@pytest.mark.parametrize("layout", get_args(Fp8Layout))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_floats_of_8_bits_are_expanded_as_before(layout: Fp8Layout, dtype: Any, tmp_path: Path) -> None:
    write_fp8(tmp_path, make_model(config("llama", **SIZES)), layout)
    loaded = with_native_cache(load_model(tmp_path, dtype=dtype), EngineOptions())
    found = decoder_of(tmp_path, packed_files(tmp_path), loaded.max_model_len, loaded.dtype)
    assert fingerprint(described_by_modules(loaded), loaded).endswith(f"\n{text_of(found)}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_are_described_as_before(dtype: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    save_in_mxfp4(make_model(config("gpt_oss", **WIDE, **sizes, dtype="float32")), tmp_path)
    assert_as_before(tmp_path, Mxfp4Weights(tmp_path), dtype=dtype)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_packed_experts_stay_in_blocks_of_the_same_numbers(layout: str, tmp_path: Path) -> None:
    written(tmp_path, PACKINGS[layout], "qwen3_moe", num_experts=4, num_experts_per_tok=4, moe_intermediate_size=64)
    loaded = with_native_cache(load_model(tmp_path, dtype="float32"), EngineOptions())
    expected = described_by_modules(loaded)
    found = decoder_of(tmp_path, packed_files(tmp_path), loaded.max_model_len)
    matrices = list(zip(matrices_in(found.layers), matrices_in(expected.layers), strict=True))
    assert sum(isinstance(one.weight, Blocks) for one, _ in matrices) == SIZES["num_hidden_layers"] * (
        4 + 3 * 4
    )  # of attention and of experts
    for one, other in matrices:
        weight = one.weight.expand() if isinstance(one.weight, Blocks) else one.weight
        torch.testing.assert_close(weight, other.weight, rtol=0, atol=0)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_weights_that_are_quantized_here_are_described_as_before(quantize: Any, family: str, tmp_path: Path) -> None:
    save(make_model(config(family, **SIZES)), tmp_path)
    files = EncodedWeights(tmp_path, Encoder(Library(torch.float32), 1), in_4_bits=quantize == "int4")
    assert_as_before(tmp_path, files, quantize=quantize)
