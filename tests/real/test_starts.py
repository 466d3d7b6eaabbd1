"""Real files start with default settings in the native step, and a wrong description of them is refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model.cpu.description import Attention, Decoder, Layer, Norm, NotKnown, RotaryTable
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start import small_model
from oaiserve.engine.start.compare import FLOAT32_TOLERANCE
from oaiserve.engine.start.ways.quantized import load_quantized
from oaiserve.files.source import find_model

pytestmark = pytest.mark.compiler
OPTIONS = EngineOptions(device="cpu")
Mutant = Callable[[Decoder], Decoder]


class Captured(Exception):
    """The small model of a start has been captured."""


def captured(path: Path) -> LoadedModel:
    """Return the small model in float32 that a start compares the description with."""
    models: list[LoadedModel] = []

    def capture(loaded: LoadedModel, _: EngineOptions) -> None:
        models.append(loaded)
        raise Captured

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_model, "_refuse_unless_described", capture)
        with pytest.raises(Exception, match="Captured"):
            load_quantized(find_model(str(path)), OPTIONS)
    return models[0]


@pytest.fixture(scope="module", params=["gemma_270m", "qwen_05b", "qwen_15b"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return captured(request.getfixturevalue(request.param))


def of_layers(change: Callable[[Layer], Layer]) -> Mutant:
    return lambda decoder: replace(decoder, layers=[change(layer) for layer in decoder.layers])


def of_attention(change: Callable[[Attention], Attention]) -> Mutant:
    return of_layers(lambda layer: replace(layer, attention=change(layer.attention)))


def of_parameters(**changes: Callable[[Any], Any]) -> Mutant:
    def change(attention: Attention) -> Attention:
        parameters = attention.parameters
        changed = {name: function(getattr(parameters, name)) for name, function in changes.items()}
        return replace(attention, parameters=replace(parameters, **changed))

    return of_attention(change)


def of_tables(change: Callable[[RotaryTable], RotaryTable]) -> Mutant:
    return of_attention(lambda attention: replace(attention, rotary=change(attention.rotary)))


def slower(table: RotaryTable) -> RotaryTable:
    """Return a table whose pairs turn by the angle of half of the positions."""
    half = torch.arange(len(table.cosines)) // 2
    return replace(table, cosines=table.cosines[half], sines=table.sines[half])


def without_weight(norm: Norm) -> Norm:
    return replace(norm, weight=torch.ones_like(norm.weight))


def of_window(change: int) -> Mutant:
    return of_parameters(sliding_window=lambda window: None if window is None else window + change)


OTHER = {"silu": "gelu_tanh", "gelu_tanh": "silu"}
MUTANTS: dict[str, Mutant] = {
    "no rotary embedding": of_attention(lambda attention: replace(attention, rotary=None)),
    "positions halved": of_tables(slower),
    "pairs of neighbours": of_tables(lambda table: replace(table, is_interleaved=True, apart=1)),
    "scale * 1.02": of_parameters(scaling=lambda scaling: scaling * 1.02),
    "window + 1": of_window(1),
    "window - 1": of_window(-1),
    "residual * 0.9": lambda decoder: replace(decoder, residual_scale=0.9 * decoder.residual_scale),
    "embedding * 1.1": lambda decoder: replace(decoder, embedding_scale=1.1 * decoder.embedding_scale),
    "activation": of_layers(lambda one: replace(one, mlp=replace(one.mlp, activation=OTHER[one.mlp.activation]))),
    "no weight of the last norm": lambda decoder: replace(decoder, final_norm=without_weight(decoder.final_norm)),
    "no norm before the MLP": of_layers(lambda layer: replace(layer, mlp_norm=without_weight(layer.mlp_norm))),
    "a layer less": lambda decoder: replace(decoder, layers=decoder.layers[:-1]),
}


def test_the_right_description_differs_by_much_less_than_is_allowed(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_model, "FLOAT32_TOLERANCE", FLOAT32_TOLERANCE / 5)
    small_model._refuse_unless_described(loaded, OPTIONS)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_description_is_refused(name: str, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    has_window = getattr(loaded.model.config, "sliding_window", None) is not None
    if "window" in name and not (has_window and "sliding_attention" in loaded.model.config.layer_types):
        return
    describe = small_model.describe
    monkeypatch.setattr(small_model, "describe", lambda *arguments: MUTANTS[name](describe(*arguments)))
    with pytest.raises(NotKnown, match="its outputs differ"):
        small_model._refuse_unless_described(loaded, OPTIONS)
