"""Mistakes in the description of a model, and how far they bring a real model's numbers from transformers' code.

    python -m tests.real.mutants

prints how far the logits then differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oaiserve.checkpoints import demo
from oaiserve.checkpoints.source import find_model
from oaiserve.engine.decoder.description import Attention, Decoder, Layer, Norm, RotaryTable
from oaiserve.engine.executors.reference.place import placed
from oaiserve.engine.start.described import Described, describe_model
from oaiserve.engine.start.layer_comparison import (
    OPTIONS,
    Comparison,
    compared,
    own_states,
    token_ids,
    transformers_states,
)
from tests.real import artefacts
from tools.markdown import as_markdown

Mutant = Callable[[Decoder], Decoder]


class RealModel(NamedTuple):
    """A described model, and what transformers' code computes of it."""

    described: Described  # in float32
    ids: list[int]
    expected: list[Tensor]

    @property
    def has_windows(self) -> bool:
        return any(layer.attention.parameters.sliding_window for layer in self.described.decoder.layers)

    def beginning(self, num_tokens: int) -> RealModel:
        """Return the model with its first tokens alone, whose numbers do not depend on the tokens after them."""
        return self._replace(ids=self.ids[:num_tokens], expected=[state[:num_tokens] for state in self.expected])

    @torch.inference_mode()
    def differences(self, mutant: Mutant) -> Iterator[Comparison]:
        """Yield the differences of all parts from transformers' code, with a mistake in the description.

        A part is computed when its difference is taken: the logits take most of the time, and few mistakes need them.
        """
        right = self.described.decoder
        mutated = self.described._replace(decoder=mutant(right))
        own = own_states(mutated, self.ids)
        if len(mutated.decoder.layers) != len(right.layers):
            first, *_, last = own
            yield from compared([first, last], [self.expected[0], self.expected[-1]])
        else:
            yield from compared(own, self.expected)


@torch.inference_mode()
def real_model(path: Path) -> RealModel:
    source = find_model(str(path))
    described = describe_model(source, OPTIONS)
    ids = token_ids(source, described)
    expected = transformers_states(source, ids, len(described.decoder.layers))
    decoder = placed(described.decoder, torch.float32, torch.device("cpu"))  # once, for all mutants
    return RealModel(described._replace(decoder=decoder), ids, expected)


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


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.995 else f"{100 * value:.2g} %"


def main() -> None:
    files = {
        "SmolLM2 135M": demo.fetched(),
        "Qwen2.5-Coder 0.5B": artefacts.fetched(artefacts.QWEN_05B),
        "Qwen2.5-Coder 1.5B": artefacts.fetched(artefacts.QWEN_15B),
        "Gemma 3 270M": artefacts.fetched(artefacts.GEMMA_270M),
    }
    mutants = {"**right**": lambda decoder: decoder, **MUTANTS, "epsilons * 100": EPSILONS}
    rows = [["", *files], *([name] for name in mutants)]
    for path in files.values():
        model = real_model(path)
        for row, (name, mutant) in zip(rows[1:], mutants.items(), strict=True):
            applies = model.has_windows or "window" not in name
            row.append(percent([*model.differences(mutant)][-1].apart) if applies else "no windows")
    print("\n".join(as_markdown(rows)))


if __name__ == "__main__":
    main()
