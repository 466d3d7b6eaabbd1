"""Quantized weights are exact if 8 bits can hold them, else close; they are refused without the native step."""

from __future__ import annotations

import pytest
import torch

from oaiserve.engine.model.cpu import build
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.errors import StartupError
from tests.engine.model.cpu.small_models import FAMILIES, config, load, native_decoder, started_runner
from tests.engine.model.steps import BLOCK_SIZE, batch_of_prompt

pytestmark = pytest.mark.compiler
STEP = 2.0**-9
# The largest matrix has three groups of weights that share a scale, the last of another length.
WIDE = config("llama", hidden_size=144, intermediate_size=272, num_attention_heads=9, num_key_value_heads=3)


def in_eight_bits(loaded: LoadedModel) -> LoadedModel:
    """Make the weights multiples of a power of two, up to 127 times that in each group: quantizing keeps them all."""
    for module in loaded.model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = (module.weight.data / STEP).round().clamp(-127, 127)
            weight[:, ::60] = 127
            module.weight.data = weight * STEP
    return loaded


def difference(loaded: LoadedModel, num_tokens: int) -> float:
    """Return the difference that quantized weights make to the logits, relative to the logits."""
    sizes = {"num_blocks": 8, "block_size": BLOCK_SIZE, "num_threads": 2}
    with torch.inference_mode():
        whole = native_decoder(loaded, **sizes).forward(batch_of_prompt(num_tokens)).clone()
        quantized = native_decoder(loaded, **sizes, quantize="int8").forward(batch_of_prompt(num_tokens))
        return float((quantized - whole).norm() / whole.norm())


@pytest.mark.parametrize("num_tokens", [1, 5, 24, 25, 90])  # few rows take another code path than many
@pytest.mark.parametrize("asked", [FAMILIES["llama"], FAMILIES["phi"], WIDE], ids=["llama", "phi", "wide"])
def test_weights_that_eight_bits_can_hold_are_exact(asked: object, num_tokens: int) -> None:
    assert difference(in_eight_bits(load(asked)), num_tokens) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_weights_lose_little(dtype: torch.dtype) -> None:
    lost = difference(load(config("llama", initializer_range=0.1), dtype=dtype), 40)
    assert 1e-3 < lost < 0.05


@pytest.mark.parametrize("problem", ["compiler", "block size"])
def test_quantization_is_refused_without_the_native_step(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if problem == "compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    block_size = 8 if problem == "block size" else BLOCK_SIZE
    loaded = load(FAMILIES["llama"])
    with pytest.raises(StartupError, match="--quantize int8 needs the native step, which cannot be used: the "):
        started_runner(loaded, num_blocks=8, block_size=block_size, quantize="int8")


def test_quantized_libraries_have_names_of_their_own() -> None:
    names = {build.library_path(torch.float32, quantize).name.rsplit("-", 1)[0] for quantize in ("none", "int8")}
    assert names == {"float", "float-int8"}
