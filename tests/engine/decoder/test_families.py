"""Families describe models from their files alone as the pinned descriptions have them."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from oaiserve.engine.decoder.dense import describe
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.settings import settings_of
from oaiserve.engine.decoder.sources.hub import HubTensors
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles
from tests.models.fingerprints import text_of
from tests.models.pinned import PINNED, file_of, pinned_model

_OTHER_TABLES = {"llama", "llama, linear", "llama, dynamic", "llama, yarn"}  # whose rotary tables are not known yet
KNOWN = [name for name, asked in PINNED.items() if asked.config.model_type in FAMILIES and name not in _OTHER_TABLES]
WITH_EXPERTS = [name for name in KNOWN if "experts.0 Expert\n" in file_of(name).read_text()]


@pytest.mark.parametrize("name", KNOWN)
def test_a_description_from_files_is_the_pinned_one(name: str, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path)
    _compare_with_pinned(name, tmp_path)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_tensor_of_all_experts_is_read_as_one_for_each(name: str, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(key.endswith(".experts.gate_up_proj") for key in file.keys())  # noqa: SIM118
    _compare_with_pinned(name, tmp_path)


def _compare_with_pinned(name: str, folder: Path) -> None:
    pinned = file_of(name).read_text()
    (length,) = re.findall(r"^max_model_len (\d+)$", pinned, re.MULTILINE)
    found = described(name, folder, int(length))
    assert pinned.endswith(f"\n{found}")


def described(name: str, folder: Path, length: int) -> str:
    asked = PINNED[name]
    family = FAMILIES[asked.config.model_type]
    settings = settings_of(json.loads((folder / "config.json").read_text()))
    tensors = HubTensors(
        TensorFiles(folder),
        family.names,
        asked.dtype,
        is_transposed=family.is_transposed,
        has_transposed_experts=family.has_transposed_experts,
    )
    with torch.inference_mode():
        return text_of(describe(tensors, settings, family, length))


def test_a_tensor_that_the_family_does_not_read_declines_the_description(tmp_path: Path) -> None:
    model = pinned_model("mistral")
    model.model.layers[1].mlp.register_parameter("strange", torch.nn.Parameter(torch.zeros(3)))
    model.save_pretrained(tmp_path)
    with pytest.raises(NotKnown, match=r"'model\.layers\.1\.mlp\.strange'"):
        described("mistral", tmp_path, 128)
