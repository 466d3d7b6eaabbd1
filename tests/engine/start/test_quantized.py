"""A model whose weights are in the blocks of its files gives the logits of the same weights, expanded."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.key_sizes import key_sizes
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.transformers_files.gguf_config import read_config
from oaiserve.engine.request import TextPrompt
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.described import describe_model
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import EMULATED_AMX, compiled_for, config, make_model
from tests.models.adapters import random_adapter
from tests.models.described import model_of_files
from tests.models.gguf_files import random_blocks, write_gguf
from tests.models.in_blocks import (
    FAMILIES,
    OPTIONS,
    TOKENIZER,
    TOKENS,
    WIDE,
    dequantized,
    file_of,
    in_eight_bits,
    kept_logits,
    own_logits,
    round_inputs,
    with_plain_experts,
    write_gpt2,
)
from tests.models.packed import save_in_mxfp4

pytestmark = pytest.mark.compiler
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
MIXTURES = {
    # All experts for each token: rounded to eight bits, one that likes two as much could get another one.
    "mixtral": config("mixtral", **WIDE, num_experts_per_tok=4, num_local_experts=4),
    "qwen2_moe": config("qwen2_moe", **WIDE, **_CHOSEN, num_experts=6, shared_expert_intermediate_size=64),
    "qwen3_moe": config("qwen3_moe", **WIDE, **_CHOSEN, num_experts=6, norm_topk_prob=True, head_dim=32),
}
GPT_OSS_SIZES: dict[str, Any] = {
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "float32",
}  # fmt: skip
GPT_OSS = config("gpt_oss", **WIDE, **GPT_OSS_SIZES, swiglu_limit=1.5)


@pytest.fixture(params=["native", pytest.param(EMULATED_AMX, marks=pytest.mark.kernels)])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compute with the code for this CPU, and with that for AMX, which rounds some inputs otherwise."""
    with compiled_for(request.param):
        yield


def expanded_logits(path: Path, num_tokens: int, adapter: Adapter | None = None) -> torch.Tensor:
    model = model_of_files(path)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "o_proj" not in name:  # Weights of o_proj have no blocks.
            round_inputs(module)
    return own_logits(model, num_tokens, adapter)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_with_expanded_weights(family: str, tmp_path: Path) -> None:
    path = file_of(FAMILIES[family], tmp_path)
    # A number between two of the eight-bit ones may be rounded to either.
    assert difference(kept_logits(path, 20), expanded_logits(path, 20)) < 0.02


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])  # sorted by head, fused, with norms behind
def test_adapters_are_added_to_products_with_blocks(family: str, tmp_path: Path) -> None:
    path = file_of(FAMILIES[family], tmp_path)
    adapter = random_adapter(describe_model(find_model(path), OPTIONS).decoder.adaptable(), 1)
    logits = kept_logits(path, 20, adapter)
    assert difference(logits, expanded_logits(path, 20, adapter)) < 0.02
    assert difference(logits, kept_logits(path, 20)) > 0.3


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize(
    ("family", "in_blocks", "kinds"),
    [
        ("mixtral", True, (Kind.Q4_0, Kind.Q4_0, Kind.Q5_1)),
        ("qwen2_moe", True, (Kind.Q4_0, Kind.Q4_0, Kind.Q5_1)),
        ("qwen3_moe", True, (Kind.MXFP4, Kind.MXFP4, Kind.MXFP4)),
        ("mixtral", False, (Kind.Q4_0, Kind.F16, Kind.F32)),
        ("mixtral", False, (Kind.Q4_0, Kind.Q5_0, Kind.F16)),
    ],
)
def test_experts_stay_in_blocks_if_gates_are_like_up_projections(
    family: str, in_blocks: bool, kinds: tuple[Kind, ...], tmp_path: Path
) -> None:
    small = MIXTURES[family]
    mix = dict(zip(("gate_exps", "up_exps", "down_exps"), kinds, strict=True))
    path = file_of(small, tmp_path, mix=mix, rest=Kind.Q8_0)
    model = dequantized(small, mix)
    with_plain_experts(model, in_blocks=in_blocks)
    assert difference(kept_logits(path, 20), own_logits(model, 20)) < 0.02


@pytest.mark.usefixtures("instructions")
def test_rows_of_formats_with_256_weights_in_a_block_are_rounded_256_numbers_at_a_time(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    small = config("mixtral", **wide, num_experts_per_tok=2, num_local_experts=2, tie_word_embeddings=False)
    mix = {"attn_v": Kind.IQ3_S, "down_exps": Kind.Q6_K, "attn_output": Kind.F16}
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(1)
    scales = {Kind.Q4_K: 3e-4, Kind.Q6_K: 7e-5, Kind.IQ3_S: 1e-3}
    parameters = [(name, parameter.detach().numpy()) for name, parameter in make_model(small).named_parameters()]

    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in mix.items() if part in name), Kind.Q4_K)

    def quantize(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        if kind not in scales:
            return gguf.quantize(values, kind)
        blocks = random_blocks(rng, kind, values.size // 256, 256, scales[kind])
        return blocks.reshape(*values.shape[:-1], -1)

    write_gguf(path, small, parameters, kind_of, quantize=quantize)
    model = model_of_files(path)
    with_plain_experts(model, in_blocks=True, together=256)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "o_proj" not in name and "gate" not in name:
            round_inputs(module, lambda module, x: in_eight_bits(module, x, 256))
    assert difference(kept_logits(path, 20), own_logits(model, 20)) < 0.02


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_mxfp4_stays_as_it_is(dtype: str, tmp_path: Path) -> None:
    save_in_mxfp4(make_model(GPT_OSS), tmp_path)
    expanded = model_of_files(tmp_path)
    with_plain_experts(expanded, in_blocks=True)
    found = kept_logits(tmp_path, 20, dtype=dtype)
    assert difference(found, own_logits(expanded, 20)) < (0.02 if dtype == "float32" else 0.1)


@pytest.mark.parametrize("is_gguf", [False, True])
def test_end_tokens_are_those_of_the_generation_config(is_gguf: bool, tmp_path: Path) -> None:
    path = gpt_oss_file(tmp_path) if is_gguf else tmp_path / "checkpoint"
    if not is_gguf:
        save_in_mxfp4(make_model(GPT_OSS), path)
    path_of_config = (path.parent if is_gguf else path) / "generation_config.json"
    path_of_config.write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert describe_model(find_model(path), OPTIONS).spec.eos_token_ids == {2, 7}


def test_a_checkpoint_with_other_tensors_than_mxfp4_is_not_described(tmp_path: Path) -> None:
    save_in_mxfp4(make_model(GPT_OSS), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(NotKnown, match="its 'model.layers.1.mlp.experts.down_proj' is no MXFP4"):
        describe_model(find_model(tmp_path), OPTIONS)
    save_file(tensors | {"model.more": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(NotKnown, match="its files have a tensor 'model.more'"):
        describe_model(find_model(tmp_path), OPTIONS)


def gpt_oss_file(folder: Path, asked: PreTrainedConfig = GPT_OSS, tokenizer: dict[str, Any] | None = None) -> Path:
    """Write a model as a checkpoint in MXFP4, and the same weights as a GGUF file in another folder."""
    model = make_model(asked)
    expanded = save_in_mxfp4(model, folder / "checkpoint")
    parameters = [(name, expanded.get(name, tensor.detach()).numpy()) for name, tensor in model.named_parameters()]
    path = folder / "model.gguf"
    write_gguf(path, asked, parameters, lambda name: Kind.MXFP4 if "_exps" in name else Kind.F32, tokenizer)
    return path


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_of_gpt_oss_is_the_model_of_its_checkpoint(dtype: str, tmp_path: Path) -> None:
    path = gpt_oss_file(tmp_path, config("gpt_oss", **WIDE, **GPT_OSS_SIZES, swiglu_limit=7.0))
    both = (path, tmp_path / "checkpoint")
    assert torch.equal(*(kept_logits(model, 60, dtype=dtype) for model in both))
    expanded = [own_logits(model_of_files(model), 60) for model in both]
    assert difference(*expanded) < 1e-5


@pytest.mark.usefixtures("instructions")
def test_factors_of_rotary_frequencies_are_applied(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 6, 8, 8], np.float32)
    path = file_of(FAMILIES["llama"], tmp_path, rope_factors=factors)
    logits = kept_logits(path, 60)
    assert difference(logits, expanded_logits(path, 60)) < 0.02
    assert difference(logits, kept_logits(file_of(FAMILIES["llama"], tmp_path), 60)) > 0.02


@pytest.mark.usefixtures("instructions")
def test_a_gguf_file_of_gpt2_has_its_positions_and_takes_adapters(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = write_gpt2(path, Kind.F32)
    spec, decoder, *_ = describe_model(find_model(path), OPTIONS)
    assert spec.max_model_len == 128
    adapter = random_adapter(decoder.adaptable(), 1)
    for one in (None, adapter):
        assert difference(kept_logits(path, 20, one), own_logits(model, 20, one)) < 1e-5
    assert difference(own_logits(model_of_files(path), 20), own_logits(model, 20)) < 1e-5


def test_an_architecture_that_nothing_reads_is_refused_with_what_to_serve(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"other"))
    with pytest.raises(
        StartupError, match=r"its architecture is 'other', .*; serve the folder or hub id with the safe.*\.$"
    ):
        read_config(Checkpoint.at(path))


def test_a_file_whose_tensors_are_not_those_of_the_model_is_not_described(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    content = path.read_bytes()
    assert content.count(b"blk.1.attn_norm.weight") == 1
    for other in ("blk.1.attn_nurm.weight", "blk.3.attn_norm.weight"):
        path.write_bytes(content.replace(b"blk.1.attn_norm.weight", other.encode()))
        with pytest.raises(NotKnown, match=f"its files have a tensor '{other}'"):
            describe_model(find_model(path), OPTIONS)


def test_keys_in_eight_bits_are_divided_by_powers_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(FAMILIES["qwen2"], tmp_path)
    monkeypatch.setattr("oaiserve.engine.decoder.key_sizes._POWER", 3)  # random weights have keys of about one size
    sizes = key_sizes(describe_model(find_model(path), replace(OPTIONS, kv_cache_dtype="int8")).decoder)
    assert len(sizes) == 3
    for of_layer in sizes.values():  # sizes of the pairs that are rotated together
        assert torch.equal(*of_layer.chunk(2, dim=-1))
        assert torch.equal(of_layer.log2(), of_layer.log2().round())
        assert len(of_layer.unique()) > 1


def test_a_model_in_several_files_has_the_numbers_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = kept_logits(file_of(FAMILIES["llama"], tmp_path / "whole"), 20)
    path = file_of(FAMILIES["llama"], tmp_path, most_tensors=9)
    assert path.name == "model-00001-of-00004.gguf"
    assert torch.equal(kept_logits(path, 20), expected)


def test_a_gguf_file_of_gpt_oss_has_its_tokenizer_and_the_token_that_ends_a_text(tmp_path: Path) -> None:
    small = config("gpt_oss", **WIDE | {"vocab_size": len(TOKENS)}, **GPT_OSS_SIZES)
    path = gpt_oss_file(tmp_path, small, TOKENIZER)
    tokenizer = Tokenizer.from_pretrained(path)
    assert len(tokenizer.encode(TextPrompt("hello"))) == 2
    assert read_config(Checkpoint.at(path)).eos_token_id == tokenizer.eos_token_id == len(TOKENS) - 1


def test_a_gguf_file_of_gpt_oss_without_a_size_is_refused_by_its_name(tmp_path: Path) -> None:
    path = gpt_oss_file(tmp_path, config("gpt_oss", **WIDE | {"vocab_size": len(TOKENS)}, **GPT_OSS_SIZES), TOKENIZER)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"gpt-oss.attention.key_length", b"gpt-oss.attention.kex_length"))
    with pytest.raises(StartupError, match=r"it has no number gpt-oss\.attention\.key_length$"):
        SimulatedEngine.from_pretrained(path, OPTIONS).__enter__()
