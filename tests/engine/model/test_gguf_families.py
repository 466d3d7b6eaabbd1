"""GGUF files of each family are read as llama.cpp's converter writes them, of which there are records."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM

from oaiserve.checkpoints.gguf import read_head
from oaiserve.engine.model.transformers_files.empty_model import named_parameters
from oaiserve.engine.model.transformers_files.gguf_weights import GgufWeights
from tests.models.described import model_of_files
from tests.models.gguf_records import Record, model_of, parameters_of, records

IDS = torch.arange(5, 25)[None]


@pytest.mark.parametrize("name", records())
def test_names_and_changes_are_those_of_the_converter(name: str) -> None:
    record = Record(name)
    model = model_of(name)
    result = record.file_tensors(model)
    assert result.keys() == record.shapes.keys()
    assert record.checksums_of(result) == record.checksums


@pytest.mark.parametrize("name", records())
def test_a_model_of_the_numbers_in_a_file_answers_as_that_of_the_checkpoint(name: str) -> None:
    record = Record(name)
    model = model_of(name)
    config = record.config()
    again = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        expected, logits = (one(IDS, use_cache=False).logits for one in (model, again))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert config.eos_token_id == 2


@pytest.mark.parametrize("name", records())
def test_a_file_has_the_numbers_of_the_model(name: str, tmp_path: Path) -> None:
    record = Record(name)
    model = model_of(name)
    path = tmp_path / "model.gguf"
    record.write(path, model, lambda _: Kind.F32)
    weights = GgufWeights(read_head(path), named_parameters(model))
    own = parameters_of(model)
    assert weights.names() == own.keys()
    for parameter, values in own.items():
        torch.testing.assert_close(weights.tensor(parameter), torch.from_numpy(values), rtol=1e-5, atol=1e-6)


def test_a_file_whose_queries_and_keys_are_limited_is_computed_by_transformers(tmp_path: Path) -> None:
    record = Record("olmo")
    record.values["olmo.attention.clamp_kqv"] = 0.5
    model = model_of("olmo")
    path = tmp_path / "model.gguf"
    record.write(path, model, lambda _: Kind.F32)
    with torch.inference_mode():
        unlimited = model(IDS).logits
        for layer in model.model.layers:
            layer.self_attn.config.clip_qkv = 0.5
        expected = model(IDS).logits
        logits = model_of_files(path)(IDS).logits
    assert not torch.allclose(expected, unlimited)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
