"""The check of a native step layer by layer, for models whose layers make much of what rounding changes.

Each layer stands alone between the embedding and the head, in transformers' code as in the native step. So what is
compared has been through one layer, and not through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from oaiserve.engine.model.adapters import Adapter
from oaiserve.engine.model.cpu.description import Decoder, Layer
from oaiserve.engine.model.cpu.module_reader import layers_of
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.check import refuse_unless_equal
from oaiserve.engine.start.some_layers import Part

_ROWS = 1024  # of the embedding and the head, which are packed again for each layer

# Gets transformers' logits of the batches of the check, for the layers that are left, with or without an adapter.
Ask = Callable[[Adapter | None], list[Tensor]]


@torch.inference_mode()
def refuse_unless_layers_are_equal(
    ask: Ask,
    make: Callable[[Decoder], NativeDecoder],
    loaded: LoadedModel,
    decoder: Decoder,
    *,
    block_size: int,
    is_quantized: bool,
    probe: Adapter | None,
) -> None:
    """Raise NotKnown unless each layer of the native step computes by itself what transformers' code does.

    A layer that reads the cache of another one is computed together with that, and an MLP that is a layer of its own
    with one that is not. With a `probe`, both are compared with that adapter, too.
    """
    rows = min(_ROWS, loaded.vocab_size)
    with _noted(loaded.model) as outputs:
        ask(None)
    for index in range(len(decoder.layers)):
        part = Part(_with_needed(index, decoder.layers), rows)
        small = part.decoder(decoder)
        adapters = [None] if probe is None else [None, _of_part(probe, small)]
        with _only(part.layers, outputs):
            expected = [logits[:, :rows] for adapter in adapters for logits in ask(adapter)]
        refuse_unless_equal(
            make(small),
            part.spec(loaded),
            expected,
            block_size=block_size,
            is_quantized=is_quantized,
            probe=adapters[-1],
        )


def _with_needed(index: int, layers: list[Layer]) -> list[int]:
    """Return a layer and the one that it cannot do without: whose cache it reads, or any that looks at other tokens."""
    attention = layers[index].attention
    if attention is not None and attention.cache_of is not None:
        return [attention.cache_of, index]
    if attention is None and layers[index].mixer is None:
        others = [other for other, layer in enumerate(layers) if layer.attention is not None or layer.mixer is not None]
        return sorted([index, *others[:1]])
    return [index]


def _of_part(probe: Adapter, decoder: Decoder) -> Adapter:
    return Adapter(probe.name, {name: probe.parts[name] for name in decoder.adaptable()})


@contextmanager
def _noted(model: PreTrainedModel) -> Iterator[list[tuple[Module, int]]]:
    """Note how many things each layer returns, or 0 for a tensor, in the order of the layers."""
    found: list[tuple[Module, int]] = []

    def note(layer: Module, _: Any, output: Any) -> None:
        sizes[layer] = len(output) if isinstance(output, tuple) else 0

    sizes: dict[Module, int] = {}
    hooks = [layer.register_forward_hook(note) for layer in layers_of(model)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
    found += [(layer, sizes[layer]) for layer in layers_of(model)]


@contextmanager
def _only(kept: Collection[int], outputs: list[tuple[Module, int]]) -> Iterator[None]:
    """Have all layers but some hand their input on as it is, while this lasts, in what they return otherwise."""
    skipped = [pair for index, pair in enumerate(outputs) if index not in kept]
    for layer, size in skipped:
        layer.forward = _handing_on(size)
    try:
        yield
    finally:
        for layer, _ in skipped:
            del layer.forward


def _handing_on(size: int) -> Callable[..., Any]:
    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return (hidden_states, *[None] * (size - 1)) if size else hidden_states

    return forward
