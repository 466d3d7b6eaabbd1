"""Describes mixers, the layers that keep a state: delta nets, Mamba 2 and short convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import (
    Convolution,
    Decoder,
    DeltaNet,
    LowRank,
    Mamba2,
    Matrix,
    Mixer,
    Norm,
    NotKnown,
    ShortConvolution,
)
from oaiserve.engine.decoder.facts import Facts
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.spec import LayerStateShapes, StateShape

MAX_TAPS = 8  # must match src/states.h
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}  # activations of convolutions, keyed by their names in settings
# The keys for: heads, numbers per head, groups of B and C, and numbers per state.
MAMBA_KEYS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
_TAPS = ("linear_conv_kernel_dim", "conv_L_cache", "conv_kernel", "mamba_d_conv")  # settings with the number of taps


def delta_net(
    reader: Reader,
    facts: Facts,
    settings: Settings,
    *,
    epsilon: float | None = None,
    rate_factor: float = 1.0,
    has_float32_speeds: bool = False,
) -> DeltaNet:
    """Describe a gated delta net. `epsilon` overrides the epsilon of its norm.

    With `has_float32_speeds`, the logarithms of speeds are not rounded to the dtype of the model.
    """
    key_heads = settings["linear_num_key_heads"]
    value_heads = settings["linear_num_value_heads"]
    key_dim = settings["linear_key_head_dim"]
    value_dim = settings["linear_value_head_dim"]
    each = value_heads // key_heads
    if reader.has("qkvz"):  # grouped by key head: its query, its key, its values and their gates
        values = each * value_dim
        projections = [_by_kind(reader.matrix("qkvz"), key_heads, [key_dim, key_dim, values, values])]
    else:
        apart = ("qkv", "z") if reader.has("qkv") else ("q", "k", "v", "z")
        projections = [reader.matrix(role) for role in apart]
    if reader.has("ba"):
        rates = [_by_kind(reader.matrix("ba"), key_heads, [each, each])]
    else:
        rates = [reader.matrix(role) for role in ("b", "a")]
    convolutions = ("conv",) if reader.has("conv") else ("conv_q", "conv_k", "conv_v")
    return DeltaNet(
        projections=projections,
        rates=rates,
        rate_factor=rate_factor,
        convolution=_convolution(reader, convolutions, settings, _activation(settings)),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        speeds=_speeds(reader, is_exact=has_float32_speeds),
        biases=reader.numbers("dt_bias"),
        norm=_gated_norm(reader, facts, epsilon),
        out=reader.matrix("out"),
    )


def kimi_delta_net(reader: Reader, facts: Facts, settings: Settings) -> DeltaNet:
    """Describe Kimi Linear's gated delta net, whose states have one decay per row."""
    heads = settings["linear_num_heads"]
    dim = settings["linear_head_dim"]
    convolutions = ("conv",) if reader.has("conv") else ("conv_q", "conv_k", "conv_v")
    return DeltaNet(
        projections=[reader.matrix(role) for role in ("q", "k", "v")],
        gates=LowRank(reader.matrix("gate_down"), reader.matrix("gate_up")),
        has_sigmoid_gates=True,
        rates=[reader.matrix("b")],
        decays=LowRank(reader.matrix("decay_down"), reader.matrix("decay_up")),
        convolution=_convolution(reader, convolutions, settings, _activation(settings)),
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        speeds=_speeds(reader).flatten().repeat_interleave(dim),
        biases=reader.exact("dt_bias").float(),
        norm=_gated_norm(reader, facts),
        out=reader.matrix("out"),
    )


def mamba2(
    reader: Reader,
    facts: Facts,
    settings: Settings,
    *,
    keys: Sequence[str] = MAMBA_KEYS,
    function: str = "hidden_act",
    limits: tuple[float, float] | None = None,
    has_norm: bool = True,
) -> Mamba2:
    """Describe a Mamba 2 mixer.

    The settings have its sizes under `keys`, and the activation of its convolution under `function`. `limits` override
    the settings' limits of time steps.
    """
    heads, head_dim, groups, state_dim = (settings[key] for key in keys)
    limits = settings["time_step_limit"] if limits is None else limits
    if limits is None:
        raise NotKnown("its time_step_limit is null")
    numbers = heads * head_dim
    times = 2 * numbers + 2 * groups * state_dim  # first row of the inputs of time steps, after gates, x, B and C
    together = reader.matrix("in")
    return Mamba2(
        projections=[together.picked(rows) for rows in (slice(numbers, times), slice(numbers), slice(times, None))],
        convolution=_convolution(reader, ("conv",), settings, _activation(settings, function)),
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=state_dim,
        speeds=_speeds(reader),
        biases=reader.numbers("dt_bias"),
        skips=reader.numbers("D"),
        least_time=float(limits[0]),
        most_time=float(limits[1]),
        norm=_gated_norm(reader, facts) if has_norm else None,
        out=reader.matrix("out"),
    )


def short_convolution(reader: Reader, _facts: Facts, settings: Settings) -> ShortConvolution:
    together = reader.matrix("in")
    width = len(together.weight) // 3
    gates, out_gates, inputs = (slice(part * width, (part + 1) * width) for part in range(3))
    return ShortConvolution(
        projections=[together.picked(rows) for rows in (inputs, gates, out_gates)],
        convolution=_convolution(reader, ("conv",), settings, "none"),
        out=reader.matrix("out"),
    )


def state_shapes(decoder: Decoder, dtype: torch.dtype) -> dict[int, LayerStateShapes]:
    """Return the shapes of each layer's state per sequence, by layer index. `dtype` is the model's."""
    mixers = ((number, layer.mixer) for number, layer in enumerate(decoder.layers))
    return {number: _state_shapes(mixer, dtype) for number, mixer in mixers if mixer is not None}


def _state_shapes(mixer: Mixer, dtype: torch.dtype) -> LayerStateShapes:
    taps, channels = mixer.convolution.weight.shape
    conv = StateShape((channels, taps), dtype)
    if isinstance(mixer, ShortConvolution):
        return LayerStateShapes(conv, None)
    if isinstance(mixer, DeltaNet):
        recurrent = (mixer.value_heads, mixer.key_dim, mixer.value_dim)
    else:
        recurrent = (mixer.heads, mixer.head_dim, mixer.state_dim)
    return LayerStateShapes(conv, StateShape(recurrent, torch.float32))


def _by_kind(matrix: Matrix, heads: int, sizes: list[int]) -> Matrix:
    """Return a matrix with its rows grouped by kind instead of by head. Each head has `sizes` rows of each kind."""
    if len(matrix.weight) != heads * sum(sizes):
        raise NotKnown(f"its projections have {len(matrix.weight)} rows for {heads} heads of {sum(sizes)}")
    parts = torch.arange(len(matrix.weight)).unflatten(0, (heads, -1)).split(sizes, dim=1)
    return matrix.picked(torch.cat([rows.flatten() for rows in parts]))


def _convolution(reader: Reader, roles: Sequence[str], settings: Settings, activation: str) -> Convolution:
    """Describe a convolution, whose channels may be in several tensors [channels, 1, taps] of the files."""
    taps = next((number for key in _TAPS if (number := settings.get(key)) is not None), None)
    parts = [reader.numbers(f"{role}.weight") for role in roles]
    if any(part.shape[1:] != (1, taps) for part in parts):
        raise NotKnown(f"its convolutions are of the shape {tuple(parts[0].shape)}, with {taps} tokens in its settings")
    weight = torch.cat(parts)[:, 0].T.contiguous()
    if not 2 <= len(weight) <= MAX_TAPS:
        raise NotKnown(f"its convolutions look at {len(weight)} tokens, and not at 2 to {MAX_TAPS}")
    biases = [reader.numbers_or_none(f"{role}.bias") for role in roles]
    own = [bias for bias in biases if bias is not None]
    if len(own) not in (0, len(roles)):
        raise NotKnown("some of its convolutions have biases, and others have none")
    return Convolution(weight, torch.cat(own) if own else None, activation)


def _activation(settings: Settings, key: str = "hidden_act") -> str:
    name = settings[key]
    if name not in _ACTIVATIONS:
        raise NotKnown(f"the activation of its convolutions is {name}")
    return _ACTIVATIONS[name]


def _speeds(reader: Reader, *, is_exact: bool = False) -> Tensor:
    """Return the speeds at which states decay, less than 0. Files on the hub store their logarithms."""
    if is_exact:
        numbers = reader.exact("A_log").float()
    else:
        numbers = reader.numbers("A_log")
    if reader.tensors.has_norms_as_computed:
        return numbers
    return -numbers.exp()


def _gated_norm(reader: Reader, facts: Facts, epsilon: float | None = None) -> Norm:
    """Describe the norm after the gates. It is stored unchanged, even in families whose other norms are not."""
    kind = replace(facts.norm, adds_one=False)
    return reader.norm("norm", kind if epsilon is None else replace(kind, epsilon=epsilon))
