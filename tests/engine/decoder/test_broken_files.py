"""Files that lack a tensor, or have one of another shape, are left to transformers, which says what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.start.described import describe_model
from oaiserve.errors import StartupError
from tests.engine.doubles import SimulatedEngine
from tests.engine.executors.native.small_models import FAMILIES, config, make_model
from tests.engine.remembered import save
from tests.models.in_blocks import OPTIONS

pytestmark = pytest.mark.compiler
MISSING = {
    "input_layernorm.weight": "llama",
    "post_attention_layernorm.weight": "llama",
    "mlp.gate_proj.weight": "llama",
    "self_attn.q_proj.bias": "llama",
    "self_attn.k_norm.weight": "qwen3",
    "mlp.up_proj.weight": "llama",
}
CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda tensor: tensor[:-1],
    "columns": lambda tensor: tensor[..., :-1],
    "no rows": lambda tensor: tensor[:0],
    "no dimension": lambda tensor: tensor.flatten()[0],
    "one dimension": torch.flatten,
    "one more dimension": lambda tensor: tensor[None],
}


@pytest.mark.parametrize("name", MISSING)
def test_a_layer_without_a_tensor_that_others_have_is_not_described(name: str, tmp_path: Path) -> None:
    save(make_model(FAMILIES[MISSING[name]]), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.{name}"]
    save_file(tensors, path)
    with pytest.raises(NotKnown):
        describe_model(find_model(tmp_path), OPTIONS)
    with pytest.raises(StartupError, match=rf"has no weights for 1 of the tensors .* model\.layers\.1\.{name}\.$"):
        SimulatedEngine.from_pretrained(tmp_path, OPTIONS).__enter__()


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3", "gemma4_text"])
def test_a_tensor_of_another_shape_is_not_described(family: str, tmp_path: Path) -> None:
    make_model(FAMILIES[family]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    describe_model(find_model(tmp_path), OPTIONS)
    described = []
    for name, tensor in tensors.items():
        if ".0." not in name and ".layers." in name:
            continue
        for change, changed in CHANGES.items():
            other = changed(tensor)
            if other.numel() == tensor.numel() and tensor.dim() < 2:
                continue  # A vector may have any dimensions.
            save_file(tensors | {name: other.clone()}, path)
            try:
                describe_model(find_model(tmp_path), OPTIONS)
            except NotKnown:
                continue
            described.append((name, change))
    assert not described


def test_a_vocabulary_of_another_size_is_not_described(tmp_path: Path) -> None:
    make_model(config("llama")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 97', '"vocab_size": 96'))
    with pytest.raises(NotKnown, match="its head has 97 rows, and its vocabulary 96 tokens"):
        describe_model(find_model(tmp_path), OPTIONS)
