"""Families describe models from their files alone as the pinned descriptions have them."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from oaiserve.engine.decoder.description import Decoder, Experts, NotKnown
from oaiserve.engine.decoder.families import FAMILIES
from oaiserve.engine.decoder.model_spec import model_spec
from tests.models.described import decoder_in, described, settings_in
from tests.models.fingerprints import fingerprint, text_of
from tests.models.pinned import PINNED, pinned_model, pinned_text

KNOWN = [name for name, asked in PINNED.items() if asked.config.model_type in FAMILIES]
WITH_EXPERTS = [name for name in KNOWN if "experts.0 Expert\n" in pinned_text(name)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns the folder of one of PINNED, which is saved once for all tests."""

    @functools.cache
    def save(name: str) -> Path:
        folder = tmp_path_factory.mktemp("pinned")
        pinned_model(name).save_pretrained(folder)
        return folder

    return save


@pytest.mark.parametrize("name", KNOWN)
def test_a_description_from_files_is_the_pinned_one(name: str, saved: Callable[[str], Path]) -> None:
    _compare_with_pinned(name, saved(name))


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_a_tensor_of_all_experts_is_read_as_one_for_each(name: str, tmp_path: Path) -> None:
    pinned_model(name).save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert any(key.endswith(".experts.gate_up_proj") for key in file.keys())  # noqa: SIM118
    _compare_with_pinned(name, tmp_path)


@pytest.mark.parametrize("name", [name for name in KNOWN if PINNED[name].dtype == torch.float32])
def test_a_file_in_float32_is_rounded_to_16_bits_as_by_transformers(name: str, saved: Callable[[str], Path]) -> None:
    from_files = decoder_in(saved(name), dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.bfloat16)
    if transformers.__version__.startswith("5.23."):
        restore_routers(model, from_files)
    assert text_of(from_files) == text_of(described(model).decoder)


def restore_routers(model: PreTrainedModel, decoder: Decoder) -> None:
    """Give a model the routers in float32 that later versions of transformers don't round."""
    parameters = dict(model.named_parameters())
    for number, layer in enumerate(decoder.layers):
        router = parameters.get(f"model.layers.{number}.mlp.gate.weight")
        if router is not None and isinstance(layer.mlp, Experts) and layer.mlp.router.weight.dtype == torch.float32:
            router.data = layer.mlp.router.weight.clone()


def _compare_with_pinned(name: str, folder: Path) -> None:
    decoder = decoder_in(folder, dtype=PINNED[name].dtype)
    spec = model_spec(settings_in(folder), decoder, dtype=PINNED[name].dtype, device=torch.device("cpu"))
    assert fingerprint(decoder, spec) == pinned_text(name)


def test_a_tensor_that_the_family_does_not_read_declines_the_description(tmp_path: Path) -> None:
    model = pinned_model("mistral")
    model.model.layers[1].mlp.register_parameter("strange", torch.nn.Parameter(torch.zeros(3)))
    model.save_pretrained(tmp_path)
    with pytest.raises(NotKnown, match=r"'model\.layers\.1\.mlp\.strange'"):
        decoder_in(tmp_path)


@pytest.mark.parametrize("name", ["gemma4_text", "llama"])
def test_descriptions_do_not_depend_on_the_default_dtype(name: str, saved: Callable[[str], Path]) -> None:
    """While transformers loads a model in any thread, it changes the default dtype of all threads."""
    expected = text_of(decoder_in(saved(name)))
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert text_of(decoder_in(saved(name))) == expected
    finally:
        torch.set_default_dtype(torch.float32)
