"""Describes the modules with a state, which transformers calls *mixers*.

`describe.py` reads the rest of a model, and its checks are for these parts, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.decoder.description import (
    Convolution,
    DeltaNet,
    Mamba2,
    Matrix,
    Mixer,
    Norm,
    NotKnown,
    ShortConvolution,
)
from oaiserve.engine.decoder.spec import LayerStateShapes, StateShape
from oaiserve.engine.model.cpu.module_reader import ModuleReader

MAX_TAPS = 8  # as in src/states.h
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "none": "none"}  # in library.ACTIVATIONS, by transformers' name


def mixer(reader: ModuleReader, index: int, layer: Module) -> Mixer:
    """Describe the mixer of a layer. Raises NotKnown."""
    for name, describe in _MIXERS.items():
        if (module := getattr(layer, name, None)) is not None:
            return describe(reader, index, module)
    raise NotKnown("it has no operations for layers that keep such a state")


def _delta_net(reader: ModuleReader, index: int, net: Any) -> DeltaNet:
    names = {name for name, _ in net.named_children()}
    if not names & {"in_proj_qkvz", "in_proj_qkv", "g_proj"}:
        raise NotKnown(f"it has no operations for states of type {type(net).__name__}")
    key_heads, value_heads, key_dim, value_dim = net.num_k_heads, net.num_v_heads, net.head_k_dim, net.head_v_dim
    each = value_heads // key_heads
    if "in_proj_qkvz" in names:
        # Sorted by key head, each with its query, its key, its values and their gates.
        together = reader.matrix(reader.child(net, "in_proj_qkvz"))
        projections = [_sorted(together, key_heads, [key_dim, key_dim, *[each * value_dim] * 2])]
        rates = [_sorted(reader.matrix(reader.child(net, "in_proj_ba")), key_heads, [each, each])]
    else:
        apart = ("q_proj", "k_proj", "v_proj", "g_proj") if "g_proj" in names else ("in_proj_qkv", "in_proj_z")
        projections = [reader.matrix(reader.child(net, name)) for name in apart]
        rates = [reader.matrix(reader.child(net, *own)) for own in (("in_proj_b", "b_proj"), ("in_proj_a", "a_proj"))]
    convolution = _convolution(reader, net.conv1d, net.activation)
    _refuse_another_state(reader, index, convolution, (value_heads, key_dim, value_dim))
    return DeltaNet(
        projections=projections,
        rates=rates,
        rate_factor=2.0 if getattr(net, "allow_neg_eigval", False) else 1.0,
        convolution=convolution,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        speeds=_speeds(reader, net),
        biases=reader.parameter(net, "dt_bias").float(),
        norm=_gated_norm(reader, reader.child(net, "norm", "o_norm")),
        out=reader.matrix(reader.child(net, "out_proj", "o_proj")),
    )


def _mamba2(reader: ModuleReader, index: int, mixer: Any) -> Mamba2:
    if not {"num_heads", "head_dim", "n_groups"} <= vars(mixer).keys():
        raise NotKnown(f"it has no operations for states of type {type(mixer).__name__}")
    heads, head_dim, groups, state_dim = mixer.num_heads, mixer.head_dim, mixer.n_groups, mixer.ssm_state_size
    together, numbers = reader.matrix(reader.child(mixer, "in_proj")), heads * head_dim
    channels = numbers + 2 * groups * state_dim
    if len(together.weight) != numbers + channels + heads:
        raise NotKnown(f"its {type(mixer).__name__} projects to {len(together.weight)} numbers")
    # Gates come first, and the numbers of times last.
    cuts = [slice(numbers, numbers + channels), slice(numbers), slice(numbers + channels, None)]
    convolution = _convolution(reader, mixer.conv1d, mixer.activation)
    _refuse_another_state(reader, index, convolution, (heads, head_dim, state_dim))
    return Mamba2(
        projections=[together.picked(cut) for cut in cuts],
        convolution=convolution,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=state_dim,
        speeds=_speeds(reader, mixer),
        biases=reader.parameter(mixer, "dt_bias").float(),
        skips=reader.parameter(mixer, "D").float(),
        least_time=float(mixer.time_step_limit[0]),
        most_time=float(mixer.time_step_limit[1]),
        norm=_gated_norm(reader, mixer.norm),
        out=reader.matrix(reader.child(mixer, "out_proj")),
    )


def _short_convolution(reader: ModuleReader, index: int, mixer: Any) -> ShortConvolution:
    convolution = _convolution(reader, mixer.conv, "none")
    _refuse_another_state(reader, index, convolution, None)
    # Gates of the inputs come first, then those of the outputs.
    gates, out_gates, inputs = (
        slice(part * convolution.weight.shape[1], (part + 1) * convolution.weight.shape[1]) for part in range(3)
    )
    together = reader.matrix(reader.child(mixer, "in_proj"))
    return ShortConvolution(
        projections=[together.picked(rows) for rows in (inputs, gates, out_gates)],
        convolution=convolution,
        out=reader.matrix(reader.child(mixer, "out_proj")),
    )


def _speeds(reader: ModuleReader, mixer: Any) -> Tensor:
    """Return the speeds at which states fade, less than 0; a checkpoint has their logarithms."""
    return -reader.parameter(mixer, "A_log").float().exp()


def _sorted(matrix: Matrix, heads: int, sizes: list[int]) -> Matrix:
    """Return a matrix sorted by head, each with groups of these numbers of rows, sorted by group instead."""
    parts = torch.arange(len(matrix.weight)).unflatten(0, (heads, -1)).split(sizes, dim=1)
    return matrix.picked(torch.cat([rows.flatten() for rows in parts]))


def _convolution(reader: ModuleReader, convolution: Any, activation: str) -> Convolution:
    weight = reader.parameter(convolution, "weight").float()[:, 0].T.contiguous()
    if not 2 <= len(weight) <= MAX_TAPS:
        raise NotKnown(f"its convolutions look at {len(weight)} tokens, and not at 2 to {MAX_TAPS}")
    if activation not in _ACTIVATIONS:
        raise NotKnown(f"the activation of its convolutions is {activation}")
    return Convolution(weight, reader.floats(convolution, "bias"), _ACTIVATIONS[activation])


def _gated_norm(reader: ModuleReader, norm: Any) -> Norm:
    return Norm(reader.parameter(norm, "weight").float(), None, norm.variance_epsilon, subtracts_mean=False)


def _refuse_another_state(
    reader: ModuleReader, index: int, convolution: Convolution, recurrent: tuple[int, ...] | None
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
_MIXERS: dict[str, Callable[[ModuleReader, int, Any], Mixer]] = {
    "linear_attn": _delta_net,
    "mamba": _mamba2,
    "mixer": _mamba2,
    "conv": _short_convolution,
}
