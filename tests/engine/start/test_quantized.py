"""A model whose weights stay in the blocks of its files gives the logits of the same weights, expanded.

A later start of a GGUF file, without transformers, gives the same numbers, or is refused.
"""

import json
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

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.key_sizes import key_sizes
from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.batch import build_batch
from oaiserve.engine.model.checkpoints.gguf_config import read_config
from oaiserve.engine.model.checkpoints.gguf_weights import NotKept
from oaiserve.engine.model.families import FAMILIES as FAMILIES_OF_FILES
from oaiserve.engine.model.rehearsal import prompt
from oaiserve.engine.request import TextPrompt
from oaiserve.engine.start.cache import cache_key, recall_model, start_checked
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.start.request import StartRequest
from oaiserve.engine.start.ways.quantized import load_quantized, reason_to_expand, start_quantized
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import StartupError
from oaiserve.files.gguf import read_tensors, shard_paths
from oaiserve.files.source import find_model
from oaiserve.files.start_cache import NotRemembered
from tests.engine.model.cpu.small_models import BLOCK_SIZE, config, make_model
from tests.engine.remembered import answer, wait_until_remembered
from tests.models.adapters import random_adapter
from tests.models.gguf_files import random_blocks, write_gguf
from tests.models.gguf_records import Record, model_of
from tests.models.in_blocks import (
    FAMILIES,
    OPTIONS,
    TOKENIZER,
    TOKENS,
    WIDE,
    batch_of,
    dequantized,
    eager_logits,
    file_of,
    in_eight_bits,
    kept_logits,
    round_inputs,
    with_plain_experts,
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


def expanded_logits(path: Path, num_tokens: int, adapter: Adapter | None = None) -> torch.Tensor:
    loaded = load_model(path, dtype="float32")
    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear) and "o_proj" not in name:  # whose weights have no blocks
            round_inputs(module)
    return eager_logits(loaded, num_tokens, adapter)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("cache_of_blocks")
def test_logits_are_those_of_transformers_with_expanded_weights_in_each_start(family: str, tmp_path: Path) -> None:
    path = file_of(FAMILIES[family], tmp_path)
    start_and_remember(path)
    found = kept_logits(path, 20)
    # A number between two of the eight-bit ones may be rounded to either.
    assert difference(found, expanded_logits(path, 20)) < 0.02
    assert torch.equal(remembered_logits(path, 20), found)


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2"])  # sorted by head, fused, with norms behind
def test_adapters_are_added_to_products_with_blocks(family: str, tmp_path: Path) -> None:
    path = file_of(FAMILIES[family], tmp_path)
    kept = load_quantized(find_model(path), replace(OPTIONS, lora_dir=tmp_path))
    adapter = random_adapter(kept.decoder.adaptable(), 1)

    def logits(adapter: Adapter | None) -> torch.Tensor:
        return kept.native.forward(batch_of(20, kept.loaded.vocab_size, adapter)).clone()

    plain = kept_logits(path, 20)
    assert torch.equal(logits(None), plain)
    assert difference(logits(adapter), expanded_logits(path, 20, adapter=adapter)) < 0.02
    assert difference(logits(adapter), plain) > 0.3


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
    asked, mix = MIXTURES[family], dict(zip(("gate_exps", "up_exps", "down_exps"), kinds, strict=True))
    path = file_of(asked, tmp_path, mix=mix, rest=Kind.Q8_0)
    model = dequantized(asked, mix)
    with_plain_experts(model, in_blocks=in_blocks)
    assert difference(kept_logits(path, 20), eager_logits(prepare(model), 20)) < 0.02


def test_rows_of_formats_with_256_weights_in_a_block_are_rounded_256_numbers_at_a_time(tmp_path: Path) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    asked = config("mixtral", **wide, num_experts_per_tok=2, num_local_experts=2, tie_word_embeddings=False)
    mix = {"attn_v": Kind.Q6_K, "down_exps": Kind.Q6_K, "attn_output": Kind.F16}
    path, rng, scales = tmp_path / "model.gguf", np.random.default_rng(1), {Kind.Q4_K: 3e-4, Kind.Q6_K: 7e-5}
    parameters = [(name, parameter.detach().numpy()) for name, parameter in make_model(asked).named_parameters()]

    def kind_of(name: str) -> Kind:
        return next((kind for part, kind in mix.items() if part in name), Kind.Q4_K)

    def quantize(values: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:
        if kind not in scales:
            return gguf.quantize(values, kind)
        blocks = random_blocks(rng, kind, values.size // 256, 256, scales[kind])
        return blocks.reshape(*values.shape[:-1], -1)

    write_gguf(path, asked, parameters, kind_of, quantize=quantize)
    loaded = load_model(path, dtype="float32")
    with_plain_experts(loaded.model, in_blocks=True, together=256)
    for name, module in loaded.model.named_modules():
        if isinstance(module, torch.nn.Linear) and "o_proj" not in name and "gate" not in name:
            round_inputs(module, lambda module, x: in_eight_bits(module, x, 256))
    assert difference(kept_logits(path, 20), eager_logits(loaded, 20)) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_in_mxfp4_stays_as_it_is(dtype: Any, tmp_path: Path) -> None:
    save_in_mxfp4(make_model(GPT_OSS), tmp_path)
    source, options = find_model(tmp_path), replace(OPTIONS, dtype=dtype)
    assert reason_to_expand(source, options) is None
    kept = load_quantized(source, options)
    assert kept.loaded.model.get_parameter("model.layers.0.mlp.experts.down_proj").is_meta
    batch = batch_of(20, kept.loaded.vocab_size)
    expanded = load_model(tmp_path, dtype="float32")
    with_plain_experts(expanded.model, in_blocks=True)
    assert difference(kept.native.forward(batch), eager_logits(expanded, 20)) < (0.02 if dtype == "float32" else 0.1)


def test_a_checkpoint_in_mxfp4_has_the_settings_of_its_files(tmp_path: Path) -> None:
    model = make_model(GPT_OSS)
    model.generation_config.eos_token_id = [2, 7]
    save_in_mxfp4(model, tmp_path)
    loaded = load_quantized(find_model(tmp_path), OPTIONS).loaded
    assert loaded.eos_token_ids == {2, 7}


def test_a_checkpoint_with_other_tensors_than_mxfp4_is_not_kept(tmp_path: Path) -> None:
    save_in_mxfp4(make_model(GPT_OSS), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(NotKept, match="its 'model.layers.1.mlp.experts.down_proj' is no MXFP4"):
        load_quantized(find_model(tmp_path), OPTIONS)
    save_file(tensors | {"model.more": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(NotKept, match="only the file has a tensor 'model.more'"):
        load_quantized(find_model(tmp_path), OPTIONS)


def gpt_oss_file(folder: Path, asked: PreTrainedConfig = GPT_OSS, tokenizer: dict[str, Any] | None = None) -> Path:
    """Write a model as a checkpoint in MXFP4, and the same weights as a GGUF file in another folder."""
    model = make_model(asked)
    expanded = save_in_mxfp4(model, folder / "checkpoint")
    parameters = [(name, expanded.get(name, tensor.detach()).numpy()) for name, tensor in model.named_parameters()]
    path = folder / "model.gguf"
    write_gguf(path, asked, parameters, lambda name: Kind.MXFP4 if "_exps" in name else Kind.F32, tokenizer)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_of_gpt_oss_is_the_model_of_its_checkpoint(dtype: Any, tmp_path: Path) -> None:
    path = gpt_oss_file(tmp_path, config("gpt_oss", **WIDE, **GPT_OSS_SIZES, swiglu_limit=7.0))
    found = []
    for model in (path, tmp_path / "checkpoint"):
        kept = load_quantized(find_model(model), replace(OPTIONS, dtype=dtype))
        assert kept.loaded.model.get_parameter("model.layers.0.mlp.experts.down_proj").is_meta
        batch = build_batch(prompt(60, kept.loaded.vocab_size, BLOCK_SIZE), BLOCK_SIZE, torch.device("cpu"))
        found.append(kept.native.forward(batch).clone())
    assert torch.equal(*found)
    expanded = [eager_logits(load_model(model, dtype=dtype), 60) for model in (path, tmp_path / "checkpoint")]
    assert torch.equal(*expanded)


def test_factors_of_rotary_frequencies_are_applied_kept_and_expanded(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 6, 8, 8], np.float32)
    path = file_of(FAMILIES["llama"], tmp_path, rope_factors=factors)
    found = kept_logits(path, 60)
    assert difference(found, expanded_logits(path, 60)) < 0.02
    assert difference(found, kept_logits(file_of(FAMILIES["llama"], tmp_path), 60)) > 0.02


def test_weights_without_blocks_and_unknown_families_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotKept, match="it has no quantized weights"):
        kept_logits(file_of(FAMILIES["llama"], tmp_path, mix={}, rest=Kind.F16), 20)
    monkeypatch.delitem(FAMILIES_OF_FILES, "llama")
    with pytest.raises(NotKept, match="models of type 'llama' are only known expanded"):
        kept_logits(file_of(FAMILIES["llama"], tmp_path), 20)


def test_weights_of_a_family_that_only_transformers_reads_are_expanded(tmp_path: Path) -> None:
    # transformers does not read the number of positions. The writer asks for the other sizes.
    sizes = {"max_position_embeddings": 1024, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    asked = config("gpt2", **sizes, rope_parameters={"rope_theta": 1e4})
    parameters = {name: parameter.detach().numpy() for name, parameter in make_model(asked).named_parameters()}
    turned = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    in_file = ((name, values.T if name.endswith(turned) else values) for name, values in parameters.items())
    write_gguf(tmp_path / "model.gguf", asked, in_file, lambda _: Kind.F32)
    loaded = dict(load_model(tmp_path / "model.gguf", device="cpu", dtype="float32").model.named_parameters())
    assert loaded.keys() == parameters.keys()
    for name, values in parameters.items():
        np.testing.assert_array_equal(loaded[name].detach().numpy(), values, strict=True)


def test_an_architecture_that_nothing_reads_is_refused_with_those_that_can_be_read(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    path.write_bytes(path.read_bytes().replace(b"llama", b"other"))
    with pytest.raises(StartupError, match=r"its architecture is 'other', and those that can be read are arcee, .*\.$"):
        read_config(path)


def test_only_options_of_the_native_step_keep_weights_and_are_remembered(tmp_path: Path) -> None:
    source = find_model(file_of(FAMILIES["llama"], tmp_path))
    assert reason_to_expand(source, OPTIONS) is None
    for options in (EngineOptions(compile=False), EngineOptions(dtype="float16")):
        assert reason_to_expand(source, options) is not None
        assert cache_key(source.path, options) is None


def test_a_file_whose_tensors_are_not_those_of_the_model_is_not_kept(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    content = path.read_bytes()
    assert content.count(b"blk.1.attn_norm.weight") == 1
    for other in ("blk.1.attn_nurm.weight", "blk.3.attn_norm.weight"):
        path.write_bytes(content.replace(b"blk.1.attn_norm.weight", other.encode()))
        with pytest.raises(NotKept, match=f"it has a tensor '{other}', which is not known"):
            kept_logits(path, 20)


# -- what a start remembers of a file


def start_and_remember(path: Path, options: EngineOptions = OPTIONS) -> None:
    start_quantized(StartRequest(find_model(path), options, key=cache_key(path, options)))
    wait_until_remembered()


def remembered_logits(path: Path, num_tokens: int, options: EngineOptions = OPTIONS) -> torch.Tensor:
    checked = recall_model(cache_key(path, options), options)
    native = start_checked(checked, options, num_blocks=8, num_threads=2)
    return native.forward(batch_of(num_tokens, checked.spec.vocab_size)).clone()


def flip(path: Path, name: str, at: int = 2) -> None:
    """Change a byte of a tensor, which is not in its first block of floats, and nothing else of the file."""
    tensor = read_tensors(path)[name]
    with shard_paths(path)[tensor.shard].open("r+b") as file:
        file.seek(tensor.begin + at)
        (byte,) = file.read(1)
        file.seek(tensor.begin + at)
        file.write(bytes([byte ^ 0x77]))


@pytest.mark.usefixtures("cache_of_blocks")
def test_sizes_of_keys_are_the_same_in_a_later_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file_of(FAMILIES["qwen2"], tmp_path)
    options = replace(OPTIONS, kv_cache_dtype="int8")
    with monkeypatch.context() as patch:
        patch.setattr("oaiserve.engine.decoder.key_sizes._POWER", 3)  # random weights have keys of about one size
        expected = kept_logits(path, 20, kv_cache_dtype="int8")
        start_and_remember(path, options)
    assert torch.equal(remembered_logits(path, 20, options), expected)
    sizes = key_sizes(recall_model(cache_key(path, options), options).decoder)
    assert len(sizes) == 3
    for of_layer in sizes.values():  # of pairs that are rotated together, powers of two
        assert torch.equal(*of_layer.chunk(2, dim=-1))
        assert torch.equal(of_layer.log2(), of_layer.log2().round())
        assert len(of_layer.unique()) > 1


@pytest.mark.usefixtures("cache_of_blocks")
def test_a_model_in_several_files_has_the_numbers_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = kept_logits(file_of(FAMILIES["llama"], tmp_path / "whole"), 20)
    path = file_of(FAMILIES["llama"], tmp_path, most_tensors=9)
    assert path.name == "model-00001-of-00004.gguf"
    assert torch.equal(kept_logits(path, 20), expected)
    start_and_remember(path)
    assert torch.equal(remembered_logits(path, 20), expected)
    norm = next(name for name, tensor in read_tensors(path).items() if tensor.shard == 1 and "norm" in name)
    flip(path, norm)
    with pytest.raises(NotRemembered, match=r"^model-00002-of-00004\.gguf has changed$"):
        recall_model(cache_key(path, OPTIONS), OPTIONS)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])  # columns in another order; two tensors as one
@pytest.mark.usefixtures("cache_of_blocks")
def test_matrices_whose_parts_are_in_another_order_are_found_again(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Record(name).write(path, model_of(name), lambda _: Kind.Q8_0)
    start_and_remember(path)
    checked = recall_model(cache_key(path, OPTIONS), OPTIONS)
    start_checked(checked, OPTIONS, num_blocks=8, num_threads=2)  # which compares the logits


@pytest.mark.usefixtures("cache_of_blocks")
def test_blocks_that_have_changed_are_compared_or_taken_as_they_are_now(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    start_and_remember(path)
    before = remembered_logits(path, 20)
    flip(path, "blk.1.ffn_up.weight")  # of the one layer that is not compared
    after = remembered_logits(path, 20)
    assert not torch.equal(after, before)
    assert torch.equal(after, kept_logits(path, 20))
    for at in range(2, 2 + 18 * 64, 18):
        flip(path, "blk.0.attn_v.weight", at)
    with pytest.raises(NotRemembered, match="its outputs differ by .* from those of transformers' code"):
        remembered_logits(path, 20)
    flip(path, "blk.1.attn_norm.weight")
    with pytest.raises(NotRemembered, match=r"^model\.gguf has changed$"):
        recall_model(cache_key(path, OPTIONS), OPTIONS)


@pytest.mark.usefixtures("cache_of_blocks")
def test_generation_config_in_the_folder_of_a_gguf_file_sets_end_tokens(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    start_and_remember(path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    with pytest.raises(NotRemembered):
        recall_model(cache_key(path, OPTIONS), OPTIONS)
    assert load_quantized(find_model(path), OPTIONS).loaded.eos_token_ids >= {2, 7}
    assert load_model(path, dtype="float32").eos_token_ids >= {2, 7}


@pytest.mark.usefixtures("cache_of_blocks")
def test_a_file_in_another_place_is_checked_anew_and_an_untouched_copy_is_not(tmp_path: Path) -> None:
    path = file_of(FAMILIES["llama"], tmp_path)
    start_and_remember(path)
    with pytest.raises(NotRemembered, match="no earlier start"):
        recall_model(cache_key(path.rename(tmp_path / "other.gguf"), OPTIONS), OPTIONS)
    (tmp_path / "copy").write_bytes((tmp_path / "other.gguf").read_bytes())
    (tmp_path / "copy").rename(path)  # the same content in a new file
    recall_model(cache_key(path, OPTIONS), OPTIONS)


@pytest.mark.usefixtures("cache_of_blocks")
def test_a_file_with_adapters_starts_again_after_a_check_that_had_one(tmp_path: Path) -> None:
    path, options = file_of(FAMILIES["llama"], tmp_path), replace(OPTIONS, lora_dir=tmp_path)
    asked = cache_key(path, options)
    start_quantized(StartRequest(find_model(path), options, key=asked))
    wait_until_remembered()
    checked = recall_model(asked, options)
    assert len(checked.checked.expected) == 6  # three of them with an adapter
    native = start_checked(checked, options, num_blocks=8, num_threads=2)
    adapter = random_adapter(checked.decoder.adaptable(), 1)
    batch = batch_of(20, checked.spec.vocab_size, adapter)
    assert torch.equal(native.forward(batch), load_quantized(find_model(path), options).native.forward(batch))
    with pytest.raises(NotRemembered):  # what was found with adapters is another check
        recall_model(cache_key(path, OPTIONS), OPTIONS)


def test_a_gguf_file_of_gpt_oss_has_its_tokenizer_and_the_token_that_ends_a_text(tmp_path: Path) -> None:
    asked = config("gpt_oss", **WIDE | {"vocab_size": len(TOKENS)}, **GPT_OSS_SIZES)
    path = gpt_oss_file(tmp_path, asked, TOKENIZER)
    tokenizer = Tokenizer.from_pretrained(path)
    assert len(tokenizer.encode(TextPrompt("hello"))) == 2
    assert read_config(path).eos_token_id == tokenizer.eos_token_id == len(TOKENS) - 1


def test_a_gguf_file_of_gpt_oss_without_a_size_is_refused_by_its_name(tmp_path: Path) -> None:
    path = gpt_oss_file(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"gpt-oss.attention.key_length", b"gpt-oss.attention.kex_length"))
    with pytest.raises(StartupError, match=r"cannot be used: it has no number gpt-oss\.attention\.key_length\.$"):
        load_quantized(find_model(path), OPTIONS)


@pytest.mark.usefixtures("cache_of_blocks")
def test_an_engine_that_starts_again_loads_no_code_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(config("llama", **WIDE | {"vocab_size": len(TOKENS)}), tmp_path, tokenizer=TOKENIZER)

    expected = answer(path, OPTIONS)
    monkeypatch.setattr("oaiserve.engine.text.tokenizer._load", None)
    monkeypatch.setattr("oaiserve.engine.start.ways.quantized.start_quantized", None)
    assert answer(path, OPTIONS) == expected
