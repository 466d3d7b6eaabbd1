"""Checks whether the layers of a description have all their weights.

Norms, gates and biases are optional, because families differ in them. But layers of one kind have the same ones, unless
the files lack a tensor.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Expert, Layer, NotKnown

_NO_WEIGHTS = {"rotary", "query_factors"}  # fields with tables


def refuse_incomplete(layers: Sequence[Layer]) -> None:
    """Raise NotKnown for a layer whose weights differ from those of the first layer of its kind."""
    of_kinds: dict[Hashable, set[str]] = {}
    for number, layer in enumerate(layers):
        weights = _weights(layer, "")
        expected = of_kinds.setdefault(_kind(layer), weights)
        if different := weights ^ expected:
            raise NotKnown(f"not all of its layers like layer {number} have '{min(different).lstrip('.')}'")


def _kind(layer: Layer) -> Hashable:
    attention = layer.attention
    kind: Hashable = None
    if attention is not None:
        rotates = attention.rotary is not None
        owns_cache = attention.cache_of is None
        kind = (type(attention.qkv), owns_cache, attention.values_of_keys, attention.parameters.sliding_window, rotates)
    return kind, type(layer.mixer), type(layer.mlp)


def _weights(part: Any, path: str) -> set[str]:
    """Return the paths of the weights in a part. For lists, also mark the weights that all entries have."""
    if isinstance(part, Tensor | Blocks):
        return {path}
    if isinstance(part, list):
        if part and isinstance(part[0], Expert):
            return _weights(part[0], path)
        paths = [_weights(one, path) for one in part]
        if paths:
            return set().union(*paths) | {f"{name} of all" for name in set.intersection(*paths)}
        return set()
    if is_dataclass(part) and not isinstance(part, type):
        names = (field.name for field in fields(part) if field.name not in _NO_WEIGHTS)
        return set().union(*(_weights(getattr(part, name), f"{path}.{name}") for name in names))
    return set()
