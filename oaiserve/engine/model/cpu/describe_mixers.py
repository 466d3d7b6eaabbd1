"""Describes the parts of layers that keep a state, which transformers calls *mixers*.

`describe.py` reads the rest of a model, and its checks are for these parts, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.model.cpu.description import Convolution, DeltaNet, Matrix, Mixer, Norm, NotKnown
from oaiserve.engine.model.spec import LayerStateShapes, LoadedModel, StateShape

MAX_TAPS = 4  # as in src/convolution.h
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}  # in library.ACTIVATIONS, by transformers' name


class Reader(Protocol):
    """Reads parts of a model's modules, and keeps track of the parameters that it has read. Raises NotKnown."""

    loaded: LoadedModel

    def child(self, module: Module, *names: str, optional: bool = False) -> Any:
        """Return what a module has under the first of these names that it has."""

    def matrix(self, module: Module) -> Matrix:
        """Return the matrix of a linear layer."""

    def parameter(self, module: Module, name: str) -> Tensor:
        """Return a parameter."""


def mixer(reader: Reader, index: int, layer: Module) -> Mixer:
    """Describe the mixer of a layer that keeps a state. Raises NotKnown."""
    for name, describe in _MIXERS.items():
        if (module := getattr(layer, name, None)) is not None:
            return describe(reader, index, module)
    raise NotKnown("it has no operations for layers that keep such a state")


def _delta_net(reader: Reader, index: int, net: Any) -> DeltaNet:
    if not {"in_proj_qkvz", "in_proj_qkv"} & {name for name, _ in net.named_children()}:
        raise NotKnown(f"it has no operations for states of type {type(net).__name__}")
    key_heads, value_heads, key_dim, value_dim = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    each = value_heads // key_heads
    if (together := reader.child(net, "in_proj_qkvz", optional=True)) is not None:
        # Sorted by key head, each with its query, its key, its values and their gates.
        projections = [_sorted(reader.matrix(together), key_heads, [key_dim, key_dim, *[each * value_dim] * 2])]
        rates = [_sorted(reader.matrix(reader.child(net, "in_proj_ba")), key_heads, [each, each])]
    else:
        projections = [reader.matrix(reader.child(net, name)) for name in ("in_proj_qkv", "in_proj_z")]
        rates = [reader.matrix(reader.child(net, name)) for name in ("in_proj_b", "in_proj_a")]
    convolution = _convolution(reader, net.conv1d, net.activation)
    _refuse_another_state(reader, index, convolution, (value_heads, key_dim, value_dim))
    return DeltaNet(
        projections=projections,
        rates=rates,
        convolution=convolution,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        speeds=-reader.parameter(net, "A_log").float().exp(),
        biases=reader.parameter(net, "dt_bias").float(),
        norm=_gated_norm(reader, net.norm),
        out=reader.matrix(reader.child(net, "out_proj")),
    )


def _sorted(matrix: Matrix, heads: int, sizes: list[int]) -> Matrix:
    """Return a matrix whose rows are sorted by head, each with parts of these sizes, sorted by part instead."""
    parts = torch.arange(len(matrix.weight)).unflatten(0, (heads, -1)).split(sizes, dim=1)
    return matrix.picked(torch.cat([rows.flatten() for rows in parts]))


def _convolution(reader: Reader, convolution: Any, activation: str) -> Convolution:
    weight = reader.parameter(convolution, "weight").float()[:, 0].T.contiguous()
    if not 2 <= len(weight) <= MAX_TAPS:
        raise NotKnown(f"its convolutions look at {len(weight)} tokens, and not at 2 to {MAX_TAPS}")
    bias = None if convolution.bias is None else reader.parameter(convolution, "bias").float()
    if activation not in _ACTIVATIONS:
        raise NotKnown(f"the activation of its convolutions is {activation}")
    return Convolution(weight, bias, _ACTIVATIONS[activation])


def _gated_norm(reader: Reader, norm: Any) -> Norm:
    return Norm(reader.parameter(norm, "weight").float(), None, norm.variance_epsilon, subtracts_mean=False)


def _refuse_another_state(
    reader: Reader, index: int, convolution: Convolution, recurrent: tuple[int, ...] | None
) -> None:
    """Raise NotKnown unless a layer keeps the last inputs of its convolution, and so many numbers in float32."""
    taps, channels = convolution.weight.shape
    expected = LayerStateShapes(
        conv=StateShape((channels, taps), reader.loaded.dtype),
        recurrent=None if recurrent is None else StateShape(recurrent, torch.float32),
    )
    if (found := reader.loaded.state_shapes[index]) != expected:
        raise NotKnown(f"the state of its layer {index} is {found}, and not {expected}")


# By the name that layers have for them.
_MIXERS: dict[str, Callable[[Reader, int, Any], Mixer]] = {"linear_attn": _delta_net}
