"""Where all layers together round too differently, each is compared by itself, and a wrong one is still found."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from oaiserve.engine.model.adapters import probe_adapter
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.description import MLP, Decoder, Layer, NotKnown
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start import native as start
from oaiserve.engine.start.check import own_logits
from oaiserve.engine.start.check_layers import refuse_unless_layers_are_equal
from oaiserve.engine.start.native import native_decoder, transformers_logits
from tests.engine.model.cpu.small_models import BLOCK_SIZE, DEEP, FAMILIES, load

pytestmark = pytest.mark.compiler
SIZES = {"num_blocks": 4, "block_size": BLOCK_SIZE, "num_threads": 1}


@pytest.fixture(scope="module")
def deep() -> LoadedModel:
    """Return a model of which transformers' own logits in 16 bits are far from those in 32."""
    return load(DEEP, dtype=torch.bfloat16)


def test_layers_that_make_much_of_rounding_are_compared_one_by_one(
    deep: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    remembered: list[list[torch.Tensor]] = []
    native = native_decoder(deep, **SIZES, when_checked=lambda _, expected: remembered.append(expected))
    assert "Each layer is checked by itself" in caplog.text
    for ours, kept in zip(own_logits(native, deep, BLOCK_SIZE, None), remembered[0], strict=True):
        assert torch.equal(ours, kept)  # which transformers' are not


def without_window(layer: Layer) -> Layer:
    assert layer.attention is not None
    parameters = replace(layer.attention.parameters, sliding_window=None)
    return replace(layer, attention=replace(layer.attention, parameters=parameters))


def gate_for_up(layer: Layer) -> Layer:
    assert isinstance(layer.mlp, MLP)
    assert layer.mlp.gate is not None
    return replace(layer, mlp=replace(layer.mlp, gate=layer.mlp.up, up=layer.mlp.gate))


@pytest.mark.parametrize("wrong", [without_window, gate_for_up])
def test_one_wrong_layer_of_many_is_found(
    deep: LoadedModel, wrong: Callable[[Layer], Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def described(*given: object) -> Decoder:
        decoder = describe(*given)  # type: ignore[arg-type]
        layers = decoder.layers
        return replace(decoder, layers=[*layers[:4], wrong(layers[4]), *layers[5:]])

    monkeypatch.setattr(start, "describe", described)
    monkeypatch.setattr(start, "UNRELATED", 2.0)  # so that layers are compared, however far apart all together are
    with pytest.raises(NotKnown, match="its outputs differ by"):
        native_decoder(deep, **SIZES)


@pytest.mark.parametrize("family", ["gptj", "gemma4_text", "qwen3_5_text", "nemotron_h", "deepseek_v3"])
def test_each_layer_of_a_right_native_step_computes_what_its_own_code_does(family: str) -> None:
    """Layers of the first one return tuples, and of the others some read the cache of another, or keep a state."""
    loaded = load(FAMILIES[family])
    decoder = describe(loaded, transformers_logits(loaded, BLOCK_SIZE)[1])
    library = Library(loaded.dtype, "none")
    make = partial(NativeDecoder, library, num_threads=1, num_blocks=1, block_size=BLOCK_SIZE)
    has_adapters = family == "gptj"
    refuse_unless_layers_are_equal(
        lambda adapter: transformers_logits(loaded, BLOCK_SIZE, adapter)[0],
        partial(make, has_adapters=has_adapters),
        loaded,
        decoder,
        block_size=BLOCK_SIZE,
        is_quantized=False,
        probe=probe_adapter(decoder.adaptable(), loaded.dtype) if has_adapters else None,
    )
