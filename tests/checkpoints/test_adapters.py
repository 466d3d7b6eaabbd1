"""The files of an adapter are refused in a sentence where they are damaged or not supported."""

import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from oaiserve.checkpoints.adapters import BadAdapter, read_adapter
from oaiserve.engine.model.adapters import load_adapter
from tests.models.adapters import write_adapter

LAYER = "model.layers.0.self_attn.q_proj"
OTHER = "model.layers.1.mlp.down_proj"
SHAPES = {LAYER: (12, 8), OTHER: (8, 20)}


def test_ranks_scales_and_shapes_are_those_of_the_files(tmp_path: Path) -> None:
    modules = read_adapter(write_adapter(tmp_path, SHAPES, rank=4, lora_alpha=6)).modules
    assert modules.keys() == SHAPES.keys()
    assert (modules[LAYER].a.shape, modules[LAYER].b.shape) == ((4, 8), (12, 4))
    assert modules[LAYER].scale == 1.5
    by_the_root = read_adapter(write_adapter(tmp_path, SHAPES, rank=4, lora_alpha=6, use_rslora=True)).modules
    assert by_the_root[LAYER].scale == 3.0


@pytest.mark.parametrize("pattern", ["q_proj", LAYER, r"layers.\d+.self_attn.q_proj", f"^{LAYER}", ".*q_proj"])
def test_patterns_give_modules_ranks_and_scales_of_their_own(tmp_path: Path, pattern: str) -> None:
    config = {"r": 16, "lora_alpha": 16, "rank_pattern": {pattern: 4, "down_proj": 4}, "alpha_pattern": {pattern: 2}}
    modules = read_adapter(write_adapter(tmp_path, SHAPES, rank=4, **config)).modules
    assert (modules[LAYER].scale, modules[OTHER].scale) == (0.5, 4.0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "its peft_type is 'IA3'"),
        ({"use_dora": True}, "it is a DoRA adapter (use_dora)"),
        ({"modules_to_save": ["lm_head"]}, "it replaces whole modules (modules_to_save)"),
        ({"bias": "all"}, "it has biases (bias: 'all')"),
        ({"lora_bias": True}, "it has biases (lora_bias)"),
        ({"layer_replication": [[0, 4], [2, 5]]}, "it repeats layers"),
        ({"trainable_token_indices": [1]}, "single tokens"),
        ({"init_lora_weights": "pissa"}, "whose own weights its training has changed"),
        ({"r": 0}, "its r is 0"),
        ({"lora_alpha": "much"}, "its lora_alpha is much"),
        ({"lora_alpha": True}, "its lora_alpha is True"),
        ({"r": 5}, "has not the rank 5 of adapter_config.json"),
        ({"rank_pattern": {"(a+)+": 4}}, "has the expression '(a+)+', which is not supported"),
        ({"rank_pattern": {"a" * 501: 4}}, "which has 501 characters, and may have at most 500"),
        ({"rank_pattern": {f"a{number}": 4 for number in range(1025)}}, "has 1025 expressions"),
        ({"alpha_pattern": {"[": 4}}, "which is no regular expression"),
        ({"alpha_pattern": [4]}, "its alpha_pattern is not a JSON object"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    write_adapter(tmp_path, SHAPES, rank=4, **config)
    with pytest.raises(BadAdapter, match=re.escape(reason)) as error:
        read_adapter(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"lm_head.lora_embedding_A": torch.zeros(4, 8)}, "is not the lora_A or lora_B of a linear layer"),
        ({f"{LAYER}.lora_magnitude_vector": torch.zeros(4, 8)}, "is not the lora_A or lora_B of a linear layer"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 8)}, "it has only the lora_A"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 8, 2)}, "and is no matrix"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 8, dtype=torch.int32)}, "has the dtype 'I32'"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(300, 8), f"{LAYER}.lora_B.weight": torch.zeros(8, 300)}, "rank 300"),
        ({}, "it has no tensors"),
    ],
    ids=str,
)
def test_tensors_that_are_none_of_lora_are_named(tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str) -> None:
    write_adapter(tmp_path, SHAPES, rank=4)
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, tmp_path / "adapter_model.safetensors")
    with pytest.raises(BadAdapter, match=re.escape(reason)):
        read_adapter(tmp_path)


def test_missing_files_are_named_and_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    with pytest.raises(BadAdapter, match=r"adapter_config\.json.*No such file"):
        read_adapter(tmp_path)
    write_adapter(tmp_path / "outer" / "checkpoint-9", SHAPES)
    with pytest.raises(BadAdapter, match="has no adapter_config.json, but its folder 'checkpoint-9' has one"):
        read_adapter(tmp_path / "outer")
    with pytest.raises(BadAdapter, match=f"there is no folder '{tmp_path}/none'$"):
        read_adapter(tmp_path / "none")
    with pytest.raises(BadAdapter, match="fetch it with 'hf download someone/sql --local-dir FOLDER'"):
        read_adapter(Path("someone/sql"))
    (tmp_path / "lora.gguf").touch()
    with pytest.raises(BadAdapter, match="is a file, but an adapter is a folder in PEFT's format"):
        read_adapter(tmp_path / "lora.gguf")
    write_adapter(tmp_path, SHAPES)
    modules = read_adapter(tmp_path).modules
    safe = tmp_path / "adapter_model.safetensors"
    tensors = load_file(safe)
    safe.unlink()
    with pytest.raises(BadAdapter, match=r"adapter_model\.safetensors.*No such file"):
        read_adapter(tmp_path)
    torch.save(tensors, tmp_path / "adapter_model.bin")
    with pytest.raises(BadAdapter, match="pickle can run code") as refusal:
        read_adapter(tmp_path)
    exec(shlex.split(str(refusal.value).partition("Convert it with: ")[2])[2])
    assert read_adapter(tmp_path).modules.keys() == modules.keys()


def load(folder: Path, shapes: dict[str, tuple[int, int]]) -> object:
    return load_adapter("x", read_adapter(folder), shapes, torch.bfloat16, torch.device("cpu"))


def test_an_adapter_for_another_model_is_refused_with_tensor_and_shapes(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=4)
    with pytest.raises(BadAdapter) as error:
        load(tmp_path, SHAPES | {OTHER: (8, 24)})
    assert f"'base_model.model.{OTHER}.lora_A.weight' has the shape [4, 20], and the model's" in str(error.value)
    assert str(error.value).endswith("needs [4, 24]")
    with pytest.raises(BadAdapter, match=r"adapts 'model\.layers\.1\.mlp\.down_proj', which is no linear layer"):
        load(tmp_path, {LAYER: SHAPES[LAYER]})


@pytest.mark.parametrize("wrapper", ["model.language_model", "language_model.model", "model.text_model"])
def test_an_adapter_of_a_multimodal_checkpoint_has_its_names(wrapper: str, tmp_path: Path) -> None:
    shapes = {name.replace("model", wrapper, 1): shape for name, shape in SHAPES.items()}
    files = read_adapter(write_adapter(tmp_path, shapes, rank=4))
    adapter = load_adapter("x", files, SHAPES, torch.bfloat16, torch.device("cpu"))
    assert adapter.parts.keys() == SHAPES.keys()


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, SHAPES, rank=4, size=float("inf"))
    with pytest.raises(BadAdapter, match="not finite"):
        load(tmp_path, SHAPES)


def test_weights_that_are_cut_after_their_header_was_read_are_refused(tmp_path: Path) -> None:
    files = read_adapter(write_adapter(tmp_path, SHAPES, rank=4))
    with files.weights.open("r+b") as file:
        file.truncate(files.weights.stat().st_size - 1)
    with pytest.raises(BadAdapter, match="it has changed while it was read"):
        load_adapter("x", files, SHAPES, torch.bfloat16, torch.device("cpu"))


@given(cut=st.integers(0, 5000), at=st.integers(0, 700), byte=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_weights_are_refused_or_loaded(
    cut: int, at: int, byte: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_adapter(tmp_path_factory.getbasetemp() / "damaged", SHAPES, rank=4)
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[at % len(content)] = byte
    path.write_bytes(content[: len(content) - cut] if at % 2 and cut < len(content) else content)
    with suppress(BadAdapter):
        load(folder, SHAPES)
