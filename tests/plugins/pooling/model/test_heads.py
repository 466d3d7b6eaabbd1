"""Linear layers after the pooling compute what sentence-transformers defines."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from oaiserve.errors import StartupError
from oaiserve.plugins.pooling.model.heads import load_dense


@pytest.mark.parametrize("size", [4, 3])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("adds_input", [True, False])
def test_a_dense_layer_may_add_its_input(size: int, has_bias: bool, adds_input: bool, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, vectors = (torch.randn(shape, generator=generator) for shape in ((size, 4), (size,), (2, 4)))
    through = torch.randn(size, 4, generator=generator)
    tensors = {"linear.weight": weight.half()}
    expected = vectors @ weight.half().float().T
    if has_bias:
        tensors["linear.bias"] = bias
        expected = expected + bias
    expected = expected.tanh()
    config = {"in_features": 4, "out_features": size, "bias": has_bias, "activation_function": "torch.nn.Tanh"}
    if adds_input:
        config["use_residual"] = True
    if adds_input and size == 4:
        expected = expected + vectors
    elif adds_input:
        tensors["residual.weight"] = through
        expected = expected + vectors @ through.T
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_dense(config, tmp_path / "model.safetensors", "m")
    assert torch.allclose(layer(vectors), expected)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"module_input_name": "token_embeddings"}, r"'token_embeddings' \(module_input_name\)"),
        ({"module_output_name": "other"}, r"'other' \(module_output_name\)"),
        ({"activation_function": "torch.nn.Mish"}, "'Mish'"),
    ],
)
def test_a_dense_layer_that_computes_something_else_is_refused(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save_file({"linear.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    default = {"in_features": 4, "out_features": 4, "bias": False, "module_input_name": "sentence_embedding"}
    with pytest.raises(StartupError, match=says):
        load_dense(default | config, tmp_path / "model.safetensors", "m")
