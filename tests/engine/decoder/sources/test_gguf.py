"""GGUF files are described from their metadata and tensors alone as checkpoints with the same numbers are."""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.checkpoints.gguf import GgufTensor, read_head
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.describe import describe
from oaiserve.engine.decoder.description import (
    Attention,
    Decoder,
    DeltaNet,
    LatentProjection,
    Layer,
    Matrix,
    Norm,
    NotKnown,
    matrices_in,
)
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.keys import refuse_ignored, unknown
from oaiserve.engine.decoder.model_spec import model_spec
from oaiserve.engine.decoder.settings import Settings, keys_of, settings_of
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.gguf.tensors import GgufTensors
from oaiserve.engine.model.transformers_files.gguf_config import read_config
from tests.engine.executors.native.small_models import config
from tests.models.described import described as described_model
from tests.models.described import described_files, model_of_files
from tests.models.fingerprints import fingerprint, text_of
from tests.models.gguf_records import Record, model_of, records
from tests.models.in_blocks import FAMILIES as SMALL
from tests.models.in_blocks import MIX, WIDE, file_of, model_of_file, with_expanded_blocks

SETTINGS = {
    name: settings_of_gguf(
        Record(name).values, {key: GgufTensor(0, 0, key, 0, shape) for key, shape in Record(name).shapes.items()}
    )
    for name in records()
}
_CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_IN_TURNS = ["sliding_attention", "full_attention", "sliding_attention"]
FILES = {
    **SMALL,
    # Files say neither what pads texts nor what scales the scores of Gemma 2.
    "phi3": config("phi3", **WIDE | {"vocab_size": 32064, "pad_token_id": 32000}),
    "gemma2": config("gemma2", **WIDE, sliding_window=6),
    "mixtral": config("mixtral", **WIDE, num_experts_per_tok=2, num_local_experts=4),
    "qwen2_moe": config("qwen2_moe", **WIDE, **_CHOSEN, num_experts=6, shared_expert_intermediate_size=64),
    "qwen3_moe": config("qwen3_moe", **WIDE, **_CHOSEN, num_experts=6, norm_topk_prob=True, head_dim=32),
    "gpt_oss": config(
        "gpt_oss", **WIDE, sliding_window=6, layer_types=_IN_TURNS, num_local_experts=4, num_experts_per_tok=2
    ),
}


def described(path: Path, dtype: torch.dtype = torch.float32, length: int = 128) -> Decoder:
    settings = settings_of_gguf(read_head(path).values, read_head(path).tensors)
    family = FAMILIES[settings["model_type"]]
    with torch.inference_mode():
        decoder = describe(GgufTensors(read_head(path), family.names, settings, dtype), settings, family, length)
    refuse_ignored(settings)
    assert not unknown(settings)
    return decoder


@pytest.mark.parametrize("name", records())
def test_a_description_of_what_the_converter_writes_is_that_of_a_checkpoint_with_its_numbers(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    Record(name).write(path, model_of(name), lambda _: Kind.Q8_0)
    decoder = described(path)
    expected = described_model(model_of_files(path))
    spec = model_spec(SETTINGS[name], decoder, dtype=torch.float32, device=torch.device("cpu"))
    actual = fingerprint(with_expanded_blocks(decoder), replace(spec, name=expected.name))
    assert actual == fingerprint(expected.decoder, expected)
    weights = [decoder.embedding, *(matrix.weight for matrix in matrices_in(decoder))]
    in_blocks = {(one.offset, one.rows.tobytes()): one.nbytes for one in weights if isinstance(one, Blocks)}
    quantized = (tensor for tensor in read_head(path).tensors.values() if tensor.kind == Kind.Q8_0)
    assert sum(in_blocks.values()) == sum(tensor.end - tensor.begin for tensor in quantized), "a matrix is expanded"


def changed(part: Any, change: Callable[[Any], Any]) -> Any:
    """Return a part of a description in which its norms and matrices are changed."""
    if isinstance(part, (Norm, Matrix)):
        return change(part)
    if isinstance(part, list):
        return [changed(one, change) for one in part]
    if isinstance(part, (Decoder, Layer, Attention, DeltaNet)):
        values = {field.name: changed(getattr(part, field.name), change) for field in fields(part)}
        return replace(part, **values)
    return part


# Formats matter to how matrices are read: one of their own, tied ones, joined ones, and two layouts of experts.
IN_OTHER_FORMATS = ("llama", "llama, tied", "phi3", "qwen2_moe", "gpt_oss")


@pytest.mark.parametrize(
    ("name", "mix", "rest"),
    [
        *((name, MIX, Kind.Q4_0) for name in FILES),
        *((name, MIX, Kind.BF16) for name in IN_OTHER_FORMATS),
        *((name, {}, Kind.F16) for name in IN_OTHER_FORMATS),
    ],
)
def test_a_description_of_a_file_is_that_of_a_model_with_its_numbers(
    name: str, mix: dict[str, Kind], rest: Kind, tmp_path: Path
) -> None:
    path = file_of(FILES[name], tmp_path, mix, rest)
    assert_same_description(path, model_of_file(FILES[name], mix, rest))


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_vectors_of_a_file_without_blocks_are_not_rounded(name: str, tmp_path: Path) -> None:
    path = file_of(FILES[name], tmp_path, {}, Kind.F16)
    expected = text_of(described_model(model_of_file(FILES[name], {}, Kind.F16).bfloat16()).decoder)
    found = described(path, torch.bfloat16)
    assert text_of(found) != expected
    assert text_of(changed(found, with_rounded_vectors)) == expected


def with_rounded_vectors(part: Norm | Matrix) -> Norm | Matrix:
    if isinstance(part, Norm):
        return replace(part, weight=part.weight.bfloat16().float())
    return part if part.bias is None else replace(part, bias=part.bias.bfloat16())


def test_tensors_of_one_matrix_in_two_formats_stay_apart_in_blocks(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Record("qwen3_next").write(
        path, model_of("qwen3_next"), lambda name: Kind.Q4_0 if "attn_gate" in name else Kind.Q8_0
    )
    mixer = described(path).layers[0].mixer
    assert isinstance(mixer, DeltaNet)
    apart = [matrix.weight for matrix in mixer.projections]
    assert [one.kind for one in apart if isinstance(one, Blocks)] == [Kind.Q8_0, Kind.Q4_0]
    Record("qwen3_next").write(path, model_of("qwen3_next"), lambda _: Kind.Q8_0)
    mixer = described(path).layers[0].mixer
    assert isinstance(mixer, DeltaNet)
    (together,) = (matrix.weight for matrix in mixer.projections)
    assert isinstance(apart[0], Blocks)
    assert isinstance(together, Blocks)
    torch.testing.assert_close(apart[0].expand(), together.expand()[: len(apart[0])], rtol=0, atol=0)


def test_keys_and_values_of_latent_vectors_may_be_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record("deepseek_v2")
    path = tmp_path / "model.gguf"
    tensors = record.file_tensors(model_of("deepseek_v2"))
    expected = latent_matrices(record, path)
    for layer in range(3):
        keys, values = (tensors.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
        together = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
        tensors[f"blk.{layer}.attn_kv_b.weight"] = together.reshape(-1, together.shape[2])
    monkeypatch.setattr(record, "file_tensors", lambda _: tensors)
    assert torch.equal(latent_matrices(record, path), expected)


def latent_matrices(record: Record, path: Path) -> torch.Tensor:
    """Write a record's file, and return the matrices of keys and values in its description."""
    record.write(path, model_of("deepseek_v2"), lambda _: Kind.F32)
    description = [layer.attention.qkv for layer in described(path).layers if layer.attention is not None]
    weights = [one.up.weight for one in description if isinstance(one, LatentProjection)]
    return torch.stack([weight for weight in weights if isinstance(weight, torch.Tensor)])


def test_large_matrices_in_the_dtype_of_the_model_are_those_of_the_file(tmp_path: Path) -> None:
    path = file_of(config("llama", **WIDE | {"vocab_size": 9000}), tmp_path, {}, Kind.F16)
    tensor = read_head(path).tensors["token_embd.weight"]
    expected = np.fromfile(path, np.float16, (tensor.end - tensor.begin) // 2, offset=tensor.begin)
    assert expected.nbytes > 2**20
    embedding = described(path, torch.float16).embedding
    assert isinstance(embedding, torch.Tensor)
    np.testing.assert_array_equal(embedding.numpy(), expected.reshape(tensor.shape))


def test_frequencies_are_divided_by_the_factors_in_the_file(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 6, 8, 8], np.float32)
    sines = []
    for name, rope_factors in (("plain", None), ("scaled", factors)):
        (tmp_path / name).mkdir()
        decoder = described(file_of(SMALL["llama"], tmp_path / name, rope_factors=rope_factors))
        table = decoder.layers[0].attention.rotary
        sines.append(table.sines[1].asin())
    torch.testing.assert_close(sines[1], sines[0] / torch.from_numpy(factors), rtol=1e-4, atol=1e-7)


def test_rotary_factors_of_phi_3_for_its_original_length_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    factors = {"short_factor": [1 + number / 8 for number in range(8)], "long_factor": [2.0 + n for n in range(8)]}
    kind = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.25, **factors}
    phi3 = config("phi3", **WIDE | {"vocab_size": 32064}, original_max_position_embeddings=64, rope_parameters=kind)
    path = file_of(phi3, tmp_path, {}, Kind.F32)
    model = model_of_file(phi3, {}, Kind.F32)
    found = described_files(path, model)
    expected = described_model(model)
    assert found.max_model_len == expected.max_model_len == 64
    tables = [one.decoder.layers[0].attention.rotary for one in (found, expected)]
    torch.testing.assert_close(tables[0].cosines, tables[1].cosines)
    torch.testing.assert_close(tables[0].sines, tables[1].sines)
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        torch.testing.assert_close(model_of_files(path)(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_only_layers_of_olmo_3_without_a_window_have_scaled_rotary_tables(tmp_path: Path) -> None:
    record = Record("olmo3")
    prefix = "olmo2.rope.scaling"
    record.values |= {f"{prefix}.type": "yarn", f"{prefix}.factor": 4.0, f"{prefix}.original_context_length": 32}
    path = tmp_path / "model.gguf"
    model = model_of("olmo3")
    record.write(path, model, lambda _: Kind.F32)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    model.config.rope_parameters["full_attention"] |= yarn
    model.config.rms_norm_eps = float(np.float32(model.config.rms_norm_eps))
    assert_same_description(path, model)


def test_a_description_of_a_model_in_several_files_is_that_of_one(tmp_path: Path) -> None:
    path = file_of(SMALL["llama"], tmp_path, most_tensors=9)
    assert_same_description(path, model_of_file(SMALL["llama"]))
    matrices = matrices_in(described(path).layers)
    parts = {one.weight.part for one in matrices if isinstance(one.weight, Blocks)}
    assert parts == {f"model-{number:05}-of-00004.gguf" for number in range(1, 4)}


def assert_same_description(path: Path, model: PreTrainedModel) -> None:
    """Compare the description of a file, with blocks expanded, with that of a checkpoint of the model."""
    expected = described_model(model)
    found = described(path, length=expected.max_model_len)
    assert text_of(with_expanded_blocks(found)) == text_of(expected.decoder)


@pytest.mark.parametrize("values", [{"granite.nextn_predict_layers": 1}, {"granite.block_count": 2}])
def test_layers_that_guess_further_tokens_are_left_out_and_no_others(
    values: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record("granite")
    path = tmp_path / "model.gguf"
    tensors = record.file_tensors(model_of("granite"))
    monkeypatch.setattr(record, "file_tensors", lambda _: tensors)
    record.values |= values
    record.write(path, model_of("granite"), lambda _: Kind.Q8_0)
    if "granite.block_count" in values:
        with pytest.raises(NotKnown, match=r"'blk\.2\.attn_k\.weight'"):
            described(path)
    else:
        assert len(described(path).layers) == 2


def test_a_file_without_a_tensor_declines_the_description(tmp_path: Path) -> None:
    path = file_of(SMALL["llama"], tmp_path)
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_v.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(NotKnown, match=r"no tensor for 'layers\.1\.v\.weight'"):
        described(path)


# -- settings


@pytest.mark.parametrize("name", records())
def test_settings_of_a_file_are_those_of_its_configuration(name: str) -> None:
    assert_same(SETTINGS[name], Record(name).config())


@pytest.mark.parametrize("name", FILES)
def test_settings_of_a_file_are_those_of_the_configuration_that_is_made_of_it(name: str, tmp_path: Path) -> None:
    path = file_of(FILES[name], tmp_path)
    assert_same(settings_of_gguf(read_head(path).values, read_head(path).tensors), read_config(Checkpoint.at(path)))


@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3"])
def test_settings_are_those_that_transformers_reads_of_a_file(name: str, tmp_path: Path) -> None:
    path = file_of(FILES[name], tmp_path)
    tensors = read_head(path).tensors
    config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    config.tie_word_embeddings = "output.weight" not in tensors
    if name == "qwen3_moe":  # transformers reads neither of these
        config.head_dim = read_head(path).values["qwen3moe.attention.key_length"]
        config.moe_intermediate_size = 32
    assert_same(settings_of_gguf(read_head(path).values, tensors), config)


def test_what_files_do_not_say_or_say_otherwise_is_as_in_a_config_json(tmp_path: Path) -> None:
    def settings(name: str, **changes: Any) -> Settings:
        path = file_of(FILES[name], tmp_path)
        architecture = read_head(path).values["general.architecture"]
        values = {f"{architecture}.{key.replace('__', '.')}": value for key, value in changes.items()}
        return settings_of_gguf({**read_head(path).values, **values}, read_head(path).tensors)

    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        assert settings(name)["query_pre_attn_scalar"] == 256
        assert settings(name, block_count=layers, embedding_length=64)["query_pre_attn_scalar"] == 16
    scaled = settings("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0, rope__freq_base=1e6)
    assert scaled["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert settings("phi3", attention__sliding_window=0)["sliding_window"] is None
    assert settings("phi3", attention__sliding_window=2047)["sliding_window"] == 2047
    for scaling in (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        {"rope__scaling__factor": 4.0},  # without a kind, as in older files, it is linear
        {"rope__scale_linear": 4.0},
    ):
        linear = settings("llama", **scaling)["rope_parameters"]
        assert (linear["rope_type"], linear["factor"]) == ("linear", 4)
    unscaled = settings("llama", rope__scaling__type="none", rope__scaling__factor=4.0)["rope_parameters"]
    assert unscaled["rope_type"] == "default"


@pytest.mark.parametrize(
    ("architecture", "plain", "axes", "deep"),
    [
        ("qwen2vl", "qwen2", [0, 0, 1, 1, 1, 2, 2, 2], None),
        ("qwen3vl", "qwen3", [0, 1, 2, 0, 1, 2, 0, 1], 3),
        ("qwen3vlmoe", "qwen3moe", [0, 1, 2, 0, 1, 2, 0, 1], 3),
    ],
)
def test_text_models_of_wrappers_are_plain_ones_with_axes_and_layers_that_images_reach(
    architecture: str, plain: str, axes: list[int], deep: int | None, tmp_path: Path
) -> None:
    path = file_of(FILES[plain.replace("moe", "_moe")], tmp_path)
    values = read_head(path).values
    tensors = read_head(path).tensors
    expected = {**settings_of_gguf(values, tensors), "rope_axes": axes, "num_deep_layers": deep}
    values = {re.sub(rf"^{plain}\.", f"{architecture}.", key): value for key, value in values.items()}
    values |= {f"{architecture}.rope.dimension_sections": [2, 3, 3, 0], f"{architecture}.n_deepstack_layers": 3}
    settings = settings_of_gguf(values, tensors)
    assert {key: settings.get(key) for key in expected} == expected


def test_a_model_like_llama_may_have_the_architecture_of_ministral_3(tmp_path: Path) -> None:
    path = file_of(FILES["llama"], tmp_path)
    values = read_head(path).values
    expected = settings_of_gguf(values, read_head(path).tensors)
    values = {re.sub(r"^llama\.", "mistral3.", key): value for key, value in values.items()}
    assert settings_of_gguf(values, read_head(path).tensors) == expected


def assert_same(found: Settings, config: PreTrainedConfig) -> None:
    stated = json.loads(config.to_json_string(use_diff=False), object_hook=with_infinity)
    if hasattr(config, "num_experts"):
        stated["num_experts"] = config.num_experts  # Some classes write it under another name.
    expected = settings_of(stated)
    others = {"head_dim", "layer_types", "num_key_value_heads", "num_deep_layers", "rope_axes", "rope_parameters"}
    keys = keys_of(found["model_type"]) | others
    assert {key: found.get(key) for key in keys} == {key: expected.get(key) for key in keys}


def with_infinity(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def test_an_architecture_that_is_not_known_declines_the_description() -> None:
    with pytest.raises(NotKnown, match="the architecture of its GGUF file is 'other'"):
        settings_of_gguf({"other.block_count": 2}, {})
