"""Mistakes in the description of a model, and how far they bring a real model's logits from transformers' code.

    python -m tests.real.mutants

prints how far logits then differ.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.decoder.description import Attention, Decoder, Layer, Norm, RotaryTable
from oaiserve.engine.model.checkpoints.gguf_weights import NotKept
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.loaded import LoadedModel
from oaiserve.engine.start import small_model
from oaiserve.engine.start.check import batches
from oaiserve.engine.start.compare import difference
from oaiserve.engine.start.kv_form import with_native_cache
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.native import native_step
from oaiserve.engine.start.prepare import short_windows
from oaiserve.engine.start.ways.quantized import load_quantized
from oaiserve.files import demo
from oaiserve.files.source import find_model
from tests.real import artefacts
from tools.markdown import as_markdown

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

    with patch.object(small_model, "_refuse_unless_described", capture), suppress(Captured, NotKept):
        if path.is_file():
            load_quantized(find_model(str(path)), OPTIONS)
        else:
            loaded = with_native_cache(load_model(path, device="cpu"), OPTIONS)
            native_step(loaded, OPTIONS, num_blocks=1, num_threads=1)
    return models[0]


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


def blunt(norm: Norm) -> Norm:
    return replace(norm, epsilon=100 * norm.epsilon)


def of_window(change: int) -> Mutant:
    return of_parameters(sliding_window=lambda window: None if window is None else window + change)


OTHER = {"silu": "gelu_tanh", "gelu_tanh": "silu"}
MUTANTS: dict[str, Mutant] = {
    "no rotary embedding": of_attention(lambda attention: replace(attention, rotary=None)),
    "positions halved": of_tables(slower),
    "pairs of neighbours rotated": of_tables(lambda table: replace(table, is_interleaved=True, apart=1)),
    "scores * 1.5": of_parameters(scaling=lambda scaling: scaling * 1.5),
    "scores * 1.02": of_parameters(scaling=lambda scaling: scaling * 1.02),
    "window + 1": of_window(1),
    "window - 1": of_window(-1),
    "residual * 0.9": lambda decoder: replace(decoder, residual_scale=0.9 * decoder.residual_scale),
    "embedding * 1.1": lambda decoder: replace(decoder, embedding_scale=1.1 * decoder.embedding_scale),
    "another activation": of_layers(
        lambda layer: replace(layer, mlp=replace(layer.mlp, activation=OTHER[layer.mlp.activation]))
    ),
    "no weight of the last norm": lambda decoder: replace(decoder, final_norm=without_weight(decoder.final_norm)),
    "no weight of norms before MLPs": of_layers(lambda layer: replace(layer, mlp_norm=without_weight(layer.mlp_norm))),
    "a layer less": lambda decoder: replace(decoder, layers=decoder.layers[:-1]),
}
# Where activations are as large as Gemma's, it changes nothing.
EPSILONS = of_layers(
    lambda layer: replace(layer, attention_norm=blunt(layer.attention_norm), mlp_norm=blunt(layer.mlp_norm))
)


def has_windows(loaded: LoadedModel) -> bool:
    return "sliding_attention" in (getattr(loaded.model.config, "layer_types", None) or ())


@torch.inference_mode()
def differences(loaded: LoadedModel, mutants: dict[str, Mutant]) -> dict[str, float]:
    """Return the largest difference of the logits of each mutant from those of transformers' code."""
    with short_windows(loaded.model):
        parameters = small_model.attention_parameters(loaded, OPTIONS.block_size)
        expected = small_model.transformers_logits(loaded, OPTIONS.block_size, parameters)
    right = describe(loaded, parameters)
    library = Library(torch.float32)
    found = {}
    for name, mutant in mutants.items():
        native = NativeDecoder(library, mutant(right), num_blocks=1, block_size=OPTIONS.block_size, num_threads=1)
        pairs = zip(batches(loaded, OPTIONS.block_size), expected, strict=True)
        found[name] = max(difference(native.forward(batch), wanted) for batch, wanted in pairs)
    return found


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.995 else f"{100 * value:.2g} %"


def main() -> None:
    files = {
        "SmolLM2 135M": demo.fetched(),
        "Qwen2.5-Coder 0.5B": artefacts.fetched(artefacts.QWEN_05B),
        "Qwen2.5-Coder 1.5B": artefacts.fetched(artefacts.QWEN_15B),
        "Gemma 3 270M": artefacts.fetched(artefacts.GEMMA_270M),
    }
    models = {title: captured(path) for title, path in files.items()}
    mutants = {"**right**": lambda decoder: decoder, **MUTANTS, "epsilons * 100": EPSILONS}
    found = {title: differences(loaded, mutants) for title, loaded in models.items()}
    rows = [["", *models]]
    for name in mutants:
        of_models = [
            "no windows" if "window" in name and not has_windows(loaded) else percent(found[title][name])
            for title, loaded in models.items()
        ]
        rows.append([name, *of_models])
    print("\n".join(as_markdown(rows)))


if __name__ == "__main__":
    main()
