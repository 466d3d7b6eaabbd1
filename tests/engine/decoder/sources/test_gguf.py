"""GGUF files are described from their metadata and tensors alone as they are by way of transformers' modules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedConfig

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.dense import describe
from oaiserve.engine.decoder.description import Decoder, NotKnown, matrices_in
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.mixers import state_shapes
from oaiserve.engine.decoder.model_spec import model_spec
from oaiserve.engine.decoder.settings import Settings, keys_of, settings_of
from oaiserve.engine.decoder.sources.gguf.settings import settings_of_gguf
from oaiserve.engine.decoder.sources.gguf.tensors import GgufTensors
from oaiserve.engine.model.checkpoints.gguf_config import read_config
from oaiserve.engine.start.ways.quantized import load_quantized
from oaiserve.files.gguf import GgufTensor, read_tensors, read_values
from oaiserve.files.source import find_model
from tests.engine.decoder.test_families import CUT, cut
from tests.models import pinned
from tests.models.fingerprints import fingerprint, text_of
from tests.models.gguf_records import Record, model_of, records
from tests.models.in_blocks import FAMILIES as SMALL
from tests.models.in_blocks import MIX, OPTIONS, file_of

SETTINGS = {
    name: settings_of_gguf(
        Record(name).values, {key: GgufTensor(0, 0, key, 0, shape) for key, shape in Record(name).shapes.items()}
    )
    for name in records()
}
DESCRIBED = [name for name in records() if SETTINGS[name]["model_type"] in FAMILIES]


def described(path: Path, dtype: torch.dtype = torch.float32, length: int = 128) -> Decoder:
    settings = settings_of_gguf(read_values(path), read_tensors(path))
    family = FAMILIES[settings["model_type"]]
    with torch.inference_mode():
        return describe(GgufTensors(path, family.names, settings, dtype), settings, family, length)


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_of_what_the_converter_writes_is_the_pinned_one(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    Record(name).write(path, model_of(name), lambda _: Kind.Q8_0)
    decoder = described(path)
    shapes = state_shapes(decoder, torch.float32)
    spec = model_spec(SETTINGS[name], decoder, dtype=torch.float32, device=torch.device("cpu"), state_shapes=shapes)
    found = fingerprint(cut(decoder) if name in CUT else decoder, spec)
    _, *expected = pinned.file_of(name, is_gguf=True).read_text().splitlines()  # a file has no name of the class
    assert found.splitlines()[1:] == expected


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rest", [Kind.Q4_0, Kind.Q8_0, Kind.BF16])
@pytest.mark.parametrize("name", [name for name, asked in SMALL.items() if asked.model_type in FAMILIES])
def test_a_description_of_a_file_is_that_of_the_modules(name: str, rest: Kind, dtype: Any, tmp_path: Path) -> None:
    path = file_of(SMALL[name], tmp_path, MIX, rest)
    assert_as_before(path, dtype)


@pytest.mark.compiler
def test_factors_of_rotary_frequencies_are_those_of_the_modules(tmp_path: Path) -> None:
    factors = np.array([1, 1, 2, 3, 4, 6, 8, 8], np.float32)
    assert_as_before(file_of(SMALL["llama"], tmp_path, rope_factors=factors))


@pytest.mark.compiler
def test_a_description_of_a_model_in_several_files_is_that_of_the_modules(tmp_path: Path) -> None:
    path = file_of(SMALL["llama"], tmp_path, most_tensors=9)
    assert_as_before(path)
    matrices = matrices_in(described(path).layers)
    parts = {one.weight.part for one in matrices if isinstance(one.weight, Blocks)}
    assert parts == {f"model-{number:05}-of-00004.gguf" for number in range(1, 4)}


def assert_as_before(path: Path, dtype: Any = "float32") -> None:
    kept = load_quantized(find_model(path), replace(OPTIONS, dtype=dtype))
    found = described(path, getattr(torch, dtype), kept.loaded.max_model_len)
    assert fingerprint(kept.decoder, kept.loaded).endswith(f"\n{text_of(found)}")


@pytest.mark.parametrize("values", [{"granite.nextn_predict_layers": 1}, {"granite.block_count": 2}])
def test_layers_that_guess_further_tokens_are_left_out_and_no_others(
    values: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, path = Record("granite"), tmp_path / "model.gguf"
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


@pytest.mark.parametrize("name", SMALL)
def test_settings_are_those_that_transformers_reads_of_a_file(name: str, tmp_path: Path) -> None:
    path = file_of(SMALL[name], tmp_path)
    assert_same(settings_of_gguf(read_values(path), read_tensors(path)), read_config(path))


def assert_same(found: Settings, config: PreTrainedConfig) -> None:
    expected = settings_of(json.loads(config.to_json_string(use_diff=False), object_hook=with_infinity))
    others = {"head_dim", "layer_types", "num_key_value_heads", "num_deep_layers", "rope_axes", "rope_parameters"}
    keys = keys_of(found["model_type"]) | others
    assert {key: found.get(key) for key in keys} == {key: expected.get(key) for key in keys}


def with_infinity(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def test_an_architecture_that_is_not_known_declines_the_description() -> None:
    with pytest.raises(NotKnown, match="the architecture of its GGUF file is 'other'"):
        settings_of_gguf({"other.block_count": 2}, {})
