"""A model whose files are cut, lie, or could run code is refused in one sentence, before torch is imported."""

import json
import pickle
import re
import shlex
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from oaiserve.checkpoints.bad_file import BadFile
from oaiserve.checkpoints.checkpoint import INDEX
from oaiserve.checkpoints.gguf import read_head
from oaiserve.checkpoints.load_errors import reported
from oaiserve.checkpoints.soundness import refuse_unless_sound, refuse_without_tokenizer
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.sources.gguf.metadata import Metadata
from oaiserve.errors import StartupError
from tests.models.gguf_files import finish

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "hidden_size": 4,
    "max_position_embeddings": 2**20,
    "sliding_window": None,
    "rms_norm_eps": 1e-6,
}


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 269060552\n"


def described(header: dict[str, Any]) -> bytes:
    """Return a safetensors file of this header, with 16 bytes for each tensor."""
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + bytes(16 * sum(name != "__metadata__" for name in header))


def tensor(place: int = 0, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [4], "data_offsets": [16 * place, 16 * place + 16]} | changes


def one_tensor(**changes: Any) -> bytes:
    return described({"a": tensor(**changes)})


def safetensors() -> bytes:
    return described({"__metadata__": {"format": "pt"}, **{f"t{i}": tensor(i) for i in range(3)}})


# Keys that some programs write for every type of rotary embedding
NO_NUMBERS_OF_LLAMA_3 = dict.fromkeys(("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder whose files are sound."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(safetensors())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        refuse_unless_sound(find_model(path))
    return str(caught.value)


def test_a_name_that_is_no_folder_is_shown_as_one_that_is_looked_for_on_the_hub(folder: Path) -> None:
    assert find_model(folder).shown == f"'{folder}'"
    assert find_model("models/mispelt").shown == (
        "'models/mispelt', which is no folder here and so was looked for on the Hugging Face hub"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("half-a.gguf", "There is '{}/half-b.gguf'."),
        ("models/tiny-15.gguf", "There is '{}/models/tiny15.gguf'."),
        ("modles/tiny15.gguf", "There is '{}/models/tiny15.gguf'."),
        ("modles/other.gguf", "There is '{}/models'."),
        ("none/of/these.gguf", "It must be a folder, a .gguf file, a hub id"),
    ],
)
def test_a_path_with_a_typo_is_refused_with_the_nearest_one(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny15.gguf").touch()
    (tmp_path / "half-b.gguf").touch()
    with pytest.raises(StartupError, match=re.escape(f"which does not exist. {says.format(tmp_path)}")):
        find_model(tmp_path / name)


def test_a_name_for_the_hub_is_shown_with_the_folder_of_nearly_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "qwen3-0.6b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_model("qwen3-06b").shown.startswith("'qwen3-06b', which is no folder here (there is 'qwen3-0.6b')")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama3.2:1b", "It looks like a name of Ollama's library. Give a hub id, such as "),
        ("qwen2.5-coder:7b-instruct-q4_K_M", "'ollama show qwen2.5-coder:7b-instruct-q4_K_M --modelfile' prints"),
        ("hf.co/bartowski/Qwen:Q4_K_M", "Give a hub id without 'hf.co/': bartowski/Qwen:Q4_K_M."),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "without 'https://huggingface.co/': Qwen/Qwen3-0.6B."),
    ],
)
def test_names_as_other_programs_have_them_are_refused_with_what_to_give(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartupError, match=re.escape(says)):
        find_model(name)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "It has an adapter: serve the model that it is for, with --lora NAME="),
        ("modules.json", "sentence-transformers saved it long ago. Save it again: python -c "),
        ("model.gguf", "Give one of its .gguf files instead, such as .*/model.gguf'"),
    ],
)
def test_a_folder_without_a_config_is_refused_with_what_to_do(file: str, says: str, tmp_path: Path) -> None:
    for name in (file, "a-mmproj.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(StartupError, match=f"a folder without a config.json, so it has no model to load. {says}"):
        find_model(tmp_path)


def test_a_sound_model_passes_and_so_does_a_mixture_with_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    refuse_unless_sound(find_model(folder))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 10**12}, "its vocab_size is 1e+12, but can be at most "),
        ({"vocab_size": 0}, "its vocab_size is 0, but must be at least 1"),
        ({"rope_parameters": {"rope_type": [1]}}, "its rope_type is [1], but must be a name"),
        ({"text_config": {"rope_scaling": {"type": {}}}}, "its type is {}, but must be a name"),
        ({"head_dim": 10**10}, "its head_dim is 1e+10, but can be at most "),
        ({"num_hidden_layers": 10**9}, "its num_hidden_layers is 1e+09, but can be at most "),
        ({"num_hidden_layers": 1e9}, "its num_hidden_layers is 1e+09, but can be at most "),
        ({"num_hidden_layers": -1}, "its num_hidden_layers is -1, but must be at least 1"),
        ({"num_local_experts": 10**9}, "its num_local_experts is 1e+09, but can be at most "),
        ({"max_position_embeddings": 10**9}, "its max_position_embeddings is 1e+09, but can be at most "),
        ({"text_config": {"n_layer": 10**9}}, "its text_config.n_layer is 1e+09, but can be at most "),
        ({"vocab_size": 100, "hidden_size": 100}, "its weights are "),
        ({"intermediate_size": 400}, "its weights are "),
        ({"num_attention_heads": 20, "head_dim": 20}, "its weights are "),
        ({"eos_token_id": 10**30}, "its eos_token_id is 1e+30, but can be at most "),
        ({"rms_norm_eps": float("nan")}, "it has the number NaN"),
        ({"model_type": ["llama"]}, "its model_type is ['llama'], but must be a name, such as llama"),
        ({"rope_theta": "100000"}, 'its rope_theta is "100000", but must be a number'),
        ({"text_config": {"rope_theta": True}}, "its rope_theta is true, but must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": "8"}}, 'its factor is "8", but must be a number'),
        ({"rope_parameters": {"full_attention": {"rope_theta": None}}}, "its rope_theta is null, but must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "its factor is null, but must be a number"),
        (
            {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": None}},
            "its low_freq_factor is null, but must be ",
        ),
        ({"rope_parameters": {"rope_theta": 2**64}}, "its rope_theta is 1.84467e+19, but can be at most "),
        ({"head_dim": "8"}, 'its head_dim is "8", but must be an integer'),
        ({"sliding_window": 2.5}, "its sliding_window is 2.5, but must be an integer"),
        ({"sliding_window": [8, None]}, "its sliding_window is [8, null], but must be an integer"),
        ({"num_labels": 10**30}, "its num_labels is 1e+30, but can be at most 131072"),
        ({"transformers_weights": "adapter_model.bin"}, "its transformers_weights is not a safetensors file"),
        (b"", "it is not valid JSON"),
        (b"\xff\xfe", "it is not valid JSON"),
        (b"[" * 10**5, "it is not valid JSON"),
        (b"[]", "it is not a JSON object"),
        (b" " * (2**24 + 1), "it has more than 16 MiB"),
    ],
)
def test_a_config_that_lies_or_is_no_json_object_is_refused(
    folder: Path, change: dict[str, Any] | bytes, says: str
) -> None:
    content = change if isinstance(change, bytes) else json.dumps(CONFIG | change).encode()
    (folder / "config.json").write_bytes(content)
    assert refusal(folder).startswith(f"'{folder}/config.json' cannot be used: {says}")


@pytest.mark.parametrize(
    "change",
    [
        {"vendor_note": 2**64},
        {"vendor": {"note": [2**64, -(2**64)]}},
        {"factor": "8"},
        {"vocabulary_map": {"dtype": 7, "head_dim": "x"}, "label2id": {"rope_type": 0}},
        {"rope_theta": None, "sliding_window": None, "head_dim": None},
        {"rope_scaling": {"rope_type": "default", "factor": None}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, **NO_NUMBERS_OF_LLAMA_3}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0, **NO_NUMBERS_OF_LLAMA_3}},
        {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64, "factor": None}},
        {"rope_scaling": {"type": "longrope", "original_max_position_embeddings": 64, "low_freq_factor": None}},
    ],
)
def test_a_key_of_a_config_that_nobody_reads_may_have_any_value(folder: Path, change: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | change))
    refuse_unless_sound(find_model(folder))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is cut, or no safetensors file"),
        (safetensors()[:5], "it is cut, or no safetensors file"),
        (safetensors()[:40], "it is cut, or no safetensors file: it has 40 bytes, and needs at least "),
        (b"<!doctype html><title>Sign in</title>", "it is a web page, not the file of a model"),
        (safetensors()[:-1], "so it is cut or damaged"),
        (struct.pack("<Q", 2**63) + bytes(100), "it is cut, or no safetensors file"),
        (struct.pack("<Q", 4) + b"{{{{", "its header is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "its header is not a JSON object"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "its header does not say where the tensor 'a' is"),
        (one_tensor(data_offsets=[16, 0]), "its header does not say where the tensor 'a' is"),
        (one_tensor(data_offsets=[-16, 0]), "its header does not say where the tensor 'a' is"),
        (one_tensor(data_offsets=[16, 32]), "its tensor 'a' begins after bytes that belong to none"),
        (one_tensor(shape=[5]), "its tensor 'a' has 16 bytes, which are not the shape [5] in F32"),
        (one_tensor(shape=[2**40, 2**40]), "its tensor 'a' has 16 bytes, which are not the shape "),
        (one_tensor(shape=None), "its header does not say what shape the tensor 'a' has"),
        (one_tensor(shape=[True]), "its header does not say what shape the tensor 'a' has"),
        (one_tensor(dtype="F33"), "its tensor 'a' has the unknown type 'F33'"),
        (one_tensor(dtype=["F32"]), "its tensor 'a' has the unknown type "),
        (described({"a": tensor(), "b": tensor()}), "its tensor 'b' overlaps another one"),
        (POINTER, "it is only a pointer of Git LFS; 'git lfs pull' in its folder fetches the file itself."),
    ],
)
def test_weights_whose_header_is_wrong_are_refused(folder: Path, content: bytes, says: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert says in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "sub/x.safetensors", "../x.safetensors", "pytorch_model.bin", 7, ""]
)
def test_an_index_names_only_safetensors_of_its_own_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": name}}))
    assert refusal(folder) == (
        f"'{folder}/{INDEX}' cannot be used: it names {str(name)!r}, which is not a .safetensors file of this folder."
    )


def test_all_files_of_an_index_are_there_and_are_looked_at(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    assert "it names 2.safetensors, which is missing" in refusal(folder)
    (folder / "2.safetensors").write_bytes(safetensors()[:-1])
    assert refusal(folder).startswith(f"'{folder}/2.safetensors' cannot be used: ")
    (folder / "2.safetensors").write_bytes(safetensors())
    refuse_unless_sound(find_model(folder))
    for content in ("[", "[]", '{"weight_map": 7}', '{"weight_map": {}}'):
        (folder / INDEX).write_text(content)
        assert refusal(folder).startswith(f"'{folder}/{INDEX}' cannot be used: ")


class Harm:
    """An object whose pickle makes a file when it is opened."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_model_that_is_only_pickled_is_refused_and_not_opened(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Harm(tmp_path / "harmed"), protocol=2))
    sentence = refusal(folder)
    assert f"has weights only as pickle ({name}), a format that can run code" in sentence
    with pytest.raises(pickle.UnpicklingError):
        exec(shlex.split(sentence.partition("Convert it with: ")[2])[2])
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    "shards", [("pytorch_model.bin",), tuple(f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2))]
)
def test_the_command_in_the_refusal_of_a_pickled_model_converts_its_weights(
    folder: Path, shards: tuple[str, ...]
) -> None:
    (folder / "model.safetensors").unlink()
    shared = torch.arange(6.0).reshape(2, 3)
    tensors = {name: {f"{name}.weight": shared, f"{name}.turned": shared.T} for name in shards}
    for name in shards:
        torch.save(tensors[name], folder / name)
    (folder / "optimizer.bin").write_bytes(b"not opened")
    exec(shlex.split(refusal(folder).partition("Convert it with: ")[2])[2])
    torch.testing.assert_close(
        load_file(folder / "model.safetensors"), {key: one for part in tensors.values() for key, one in part.items()}
    )
    refuse_unless_sound(find_model(folder))


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    source = find_model(folder)
    with pytest.raises(StartupError, match="has no tokenizer: there is neither tokenizer.json nor another file of one"):
        refuse_without_tokenizer(source)
    for name in ("tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "qwen.tiktoken"):
        (folder / name).touch()
        refuse_without_tokenizer(source)
        (folder / name).unlink()
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(StartupError, match=r"tokenizer\.json' cannot be used: it is only a pointer of Git LFS"):
        refuse_without_tokenizer(source)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"'{folder}' has no weights: there is neither model.safetensors nor {INDEX}."


# -- GGUF -------------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(
    *,
    version: int = 3,
    values: int | None = None,
    tensors: int | None = None,
    layers: int = 1,
    tokens: int = 2,
    rows: int = 4,
    kind: int = 0,
    begin: int = 0,
    second: int | None = None,
    files: int = 0,
    file_type: int | None = None,
    name: str = "t",
    more: tuple[bytes, ...] = (),
) -> bytes:
    """A GGUF file with one tensor. Each argument replaces something in it that is right.

    `more` are further values, with their keys. With `second`, another tensor begins there. With `files`, the file says
    that the model is in this number of files.
    """
    parts = [
        text("llama.block_count") + struct.pack("<II", 4, layers),
        text("general.name") + struct.pack("<I", 8) + text("small"),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, tokens) + text("a") + text("b"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0),
    ]
    parts += more
    if files:
        parts.append(text("split.count") + struct.pack("<IH", 2, files))
    if file_type is not None:
        parts.append(text("general.file_type") + struct.pack("<II", 4, file_type))
    if tensors is None:
        tensors = 1 if second is None else 2
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, len(parts) if values is None else values)
    head += b"".join(parts) + text(name) + struct.pack("<IQQIQ", 2, 4, rows, kind, begin)
    if second is not None:
        head += text("u") + struct.pack("<IQQIQ", 2, 4, rows, kind, second)
    return head + bytes(-len(head) % 32 + 64)


def gguf_refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    return refusal(path)


def test_a_sound_gguf_file_passes(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf())
    refuse_unless_sound(find_model(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    "more",
    [
        text("general.parameter_count") + struct.pack("<IQ", 10, 2**64 - 1),
        text("vendor.note") + struct.pack("<IQ", 10, 2**63),
        text("vendor.hidden_size") + struct.pack("<IQ", 10, 2**63),
        text("vendor.context_length") + struct.pack("<Iq", 11, -1),
        text("llama.vendor_note") + struct.pack("<IQ", 10, 2**63),
        text("vendor.note") + struct.pack("<If", 6, float("nan")),
        text("vendor.notes") + struct.pack("<IIQ2f", 9, 6, 2, float("nan"), float("-inf")),
        text("vendor.many") + struct.pack("<IIQ", 9, 0, 2**21 + 1) + bytes(2**21 + 1),
        text("vendor.nested")
        + struct.pack("<IIQ", 9, 9, 2)
        + struct.pack("<IQ2B", 0, 2, 7, 8)
        + struct.pack("<IQ", 8, 1)
        + text("x"),
        text("vendor.none") + struct.pack("<IIQ", 9, 8, 0),
    ],
)
def test_a_key_of_a_gguf_file_that_nobody_reads_may_have_any_value(more: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(more=(more,)))
    refuse_unless_sound(find_model(path))
    assert read_head(path).values["general.name"] == "small"
    assert read_head(path).read_tokenizer()["tokenizer.ggml.tokens"] == ["a", "b"]


def test_arrays_in_arrays_end_somewhere(tmp_path: Path) -> None:
    nested = text("vendor.nested") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0)
    assert "it has an array of the unknown type 9" in gguf_refusal(tmp_path, gguf(more=(nested,)))


def test_a_setting_of_a_gguf_file_that_is_read_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf(more=(text("llama.attention.sliding_window") + struct.pack("<IQ", 10, 2**63),)))
    metadata = Metadata(read_head(path).values, read_head(path).tensors)
    with pytest.raises(BadFile, match=r"^its llama\.attention\.sliding_window is 9\.22337e\+18, but can be at most 92"):
        metadata.get("attention.sliding_window")


@pytest.mark.parametrize(("kind", "says"), [("adapter", "serve its model, with --lora"), ("mmproj", "with --mmproj")])
def test_a_gguf_file_that_is_no_model_is_refused_with_what_to_do(kind: str, says: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_type(kind)
    finish(writer)
    with pytest.raises(StartupError, match=says):
        refuse_unless_sound(find_model(tmp_path / "model.gguf"))


def test_a_gguf_file_of_a_vocabulary_alone_has_a_tokenizer_and_serves_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "bert")
    writer.add_block_count(12)
    writer.add_tokenizer_model("bert")
    finish(writer)
    assert read_head(path).read_tokenizer()["tokenizer.ggml.model"] == "bert"
    with pytest.raises(StartupError, match="it has a vocabulary, and no weights"):
        refuse_unless_sound(find_model(path))


@pytest.mark.parametrize(
    ("architecture", "values", "says"),
    [
        (
            "flux",
            {},
            "its architecture is 'flux', which makes pictures, and oaiserve serves models that read and write text",
        ),
        ("whisper", {"whisper.encoder.block_count": 4}, "its architecture is 'whisper', which writes down speech"),
        ("strange", {"strange.block_count": 4}, "its architecture is 'strange', and it has no vocabulary"),
        ("strange", {}, "its architecture is 'strange', and it has no strange.block_count"),
    ],
)
def test_a_gguf_file_of_pictures_or_sounds_is_refused_by_its_architecture(
    architecture: str, values: dict[str, int], says: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", architecture)
    for key, value in values.items():
        writer.add_uint32(key, value)
    for number in range(4):
        writer.add_tensor(f"t{number}", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(StartupError, match=re.escape(says)):
        refuse_unless_sound(find_model(tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is no GGUF file: it is empty."),
        (b"Entry not found", "it is no GGUF file: it begins with b'Entry not found'."),
        (b"\n<!DOCTYPE html>\n<html>", "it is a web page, not the file of a model"),
        (b"<html><head>", "it is a web page, not the file of a model"),
        (b"PK\x03\x04" + bytes(60), "it is an archive (zip): unpack it first"),
        (b"tjgg" + bytes(60), "its format is GGML, which GGUF replaced"),
        (POINTER, "it is only a pointer of Git LFS"),
        (b"GGUF", "it is cut, or lies about its counts: it has 4 bytes, and needs at least 8."),
        (gguf(version=1), "its GGUF version is 1, but must be 2 or 3"),
        (gguf(version=3 << 24), "its numbers are big-endian"),
        (gguf(values=2**60), "it is cut, or lies about its counts"),
        (gguf(tensors=2**60), "it is cut, or lies about its counts"),
        (gguf(tokens=2**20), "it is cut, or lies about its counts"),
        (gguf(tokens=2**60), "it has an array of 1152921504606846976 values, but can have at most 2097152"),
        (gguf(rows=2**40), "its tensor 't' ends after the file"),
        (
            gguf()[:-3],
            f"ends after the file, which has {len(gguf()) - 3:,} bytes and needs {len(gguf()):,}: it is cut, as by a",
        ),
        (gguf(begin=32), "its tensor 't' ends after the file"),
        (gguf(rows=2, second=0), "its tensor 'u' overlaps another one"),
        (gguf(begin=8), "its tensor 't' begins at 8, which is no multiple of 32"),
        (gguf(kind=99), "its tensor 't' has the unknown type 99"),
        (gguf(kind=12), "its tensor 't' has rows of 4 numbers, which are no blocks of 256"),
        (gguf(layers=10**9), "its llama.block_count is 1e+09, but can be at most "),
        (gguf(layers=0), "its llama.block_count is 0, but must be at least 1"),
    ],
)
def test_a_gguf_file_that_lies_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in gguf_refusal(tmp_path, content)


def test_the_digest_of_a_head_is_that_of_all_before_the_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf())
    head = read_head(path).digest(path)
    path.write_bytes(gguf()[:-1] + b"x")  # the last byte of the tensor
    assert read_head(path).digest(path) == head
    path.write_bytes(gguf().replace(text("small"), text("SMALL")))
    assert read_head(path).digest(path) != head


def test_a_model_in_several_files_needs_all_of_them_by_their_names(tmp_path: Path) -> None:
    first, second = (f"model-0000{number}-of-00002.gguf" for number in (1, 2))
    (tmp_path / first).write_bytes(gguf(files=2))
    assert (
        f"{first}' cannot be used: 1 of its 2 parts is missing: put {second} into the folder '{tmp_path}'."
    ) in refusal(tmp_path / first)
    (tmp_path / second).write_bytes(gguf(files=2))
    assert "two of its parts have the tensor 't'" in refusal(tmp_path / first)
    assert f"{second}' cannot be used: it is not the first part of its model, {first}." in refusal(tmp_path / second)
    (tmp_path / second).write_bytes(gguf(files=2, name="other"))
    refuse_unless_sound(find_model(tmp_path / first))
    assert [(t.name, t.shard) for t in read_head(tmp_path / first).tensors.values()] == [("t", 0), ("other", 1)]
    (tmp_path / "model.gguf").write_bytes(gguf(files=2))
    assert "its split.count is 2, so its name must end with -00001-of-00002.gguf" in refusal(tmp_path / "model.gguf")


def test_a_gguf_file_with_a_cut_head_is_refused(tmp_path: Path) -> None:
    for cut in range(len(gguf()) - 64):
        assert "cannot be used" in gguf_refusal(tmp_path, gguf()[:cut])


@given(at=st.integers(0, len(gguf()) - 1), value=st.integers(0, 255))
def test_a_changed_byte_in_a_gguf_file_passes_or_is_refused_but_is_no_other_error(
    at: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(gguf())
    content[at] = value
    path = tmp_path_factory.mktemp("changed") / "model.gguf"
    path.write_bytes(content)
    with suppress(StartupError):
        refuse_unless_sound(find_model(path))


# -- what fails in libraries ------------------------------------------------------------------------------------------


class Panic(BaseException):
    """An error that is no Exception, like a panic of Rust code."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ValueError("no\n good"), "It failed: no good"),
        (KeyError("layers"), "It failed: KeyError: 'layers'"),
        (
            AttributeError("module 'torch' has no attribute 'float17'"),
            "It failed: the model's setting dtype is 'float17', but must be one of torch's, such as bfloat16",
        ),
        (Panic("index out of range"), "It failed: Panic: index out of range"),
        (
            ValueError("Please pass the argument `trust_remote_code=True`"),
            "It failed: it needs code that comes with the model (auto_map), and oaiserve never runs such code",
        ),
    ],
)
def test_whatever_a_library_raises_is_one_sentence(error: BaseException, says: str) -> None:
    with pytest.raises(StartupError) as caught, reported("It failed"):
        raise error
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "error", [MemoryError(), ImportError("_safetensors_rust.abi3.so: failed to map segment from shared object")]
)
def test_too_little_memory_is_named_before_the_library_that_gets_none(error: Exception) -> None:
    with (
        pytest.raises(StartupError, match=r"^It failed: there is too little memory: [0-9.]+ GiB are free"),
        reported("It failed"),
    ):
        raise error


@pytest.mark.parametrize("error", [StartupError("as it is"), KeyboardInterrupt(), SystemExit(3)])
def test_some_errors_pass_as_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reported("It failed"):
        raise error
    assert caught.value is error


def test_a_refusal_comes_before_torch_is_imported(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": 10**12}))
    code = (
        "import sys; from oaiserve.cli import main; "
        f"print(main(['serve', {str(folder)!r}, '--port', '0']), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "2 False\n"
    assert result.stderr.splitlines()[-1].startswith(f"oaiserve: '{folder}/config.json' cannot be used: ")
