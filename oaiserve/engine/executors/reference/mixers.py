"""Mixers of layers with a state: gated delta nets, Mamba 2, and short convolutions.

Recurrences are computed token by token, as they are defined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu, softplus

from oaiserve.engine.decoder.description import (
    Convolution,
    DeltaNet,
    LowRank,
    Mamba2,
    Matrix,
    Mixer,
    ShortConvolution,
)
from oaiserve.engine.executors.reference.products import Products
from oaiserve.engine.model.layer_operations import ACTIVATIONS
from oaiserve.engine.model.states import LayerStates, StepStates


def mixer_output(mixer: Mixer, x: Tensor, products: Products, states: StepStates, layer: int) -> Tensor:
    """Return the output float32 [T, width] of a layer's mixer for the normed hidden state [T, width]."""
    rows = torch.cat([_product(x, part, products) for part in inputs_of(mixer)], dim=-1)
    return products(mixed(mixer, rows, states, layer), mixer.out)


def inputs_of(mixer: Mixer) -> list[Matrix | LowRank]:
    """Return the matrices that multiply the hidden state, in the order in which `mixed` reads their products."""
    parts: list[Matrix | LowRank | None] = [*mixer.projections]
    if isinstance(mixer, DeltaNet):
        parts += [mixer.gates, *mixer.rates, mixer.decays]
    return [part for part in parts if part is not None]


def _product(x: Tensor, part: Matrix | LowRank, products: Products) -> Tensor:
    if isinstance(part, LowRank):
        return products(products(x, part.down), part.up)
    return products(x, part)


def recurrence(
    state: Tensor,  # [sequences, heads, key_dim, value_dim]; changed in place
    decay: Tensor,  # [sequences, tokens, heads], or [..., key_dim] with a number for each row of a state
    key: Tensor,  # [sequences, tokens, key heads, key_dim]; several heads may share one
    value: Tensor,  # [sequences, tokens, heads, value_dim]
    query: Tensor,  # the same shape as `key`
    rate: Tensor | None,  # [sequences, tokens, heads]
) -> Tensor:
    """Return the outputs float32 [sequences, tokens, heads, value_dim] of a recurrence, token by token.

        S = decay S        S = S + key added        out = query S

    where `added` is the value, or, with a rate, (value - key S) rate.
    """
    key, query = (part.repeat_interleave(value.shape[2] // part.shape[2], dim=2) for part in (key, query))
    current = state.float()
    of_rows = decay if decay.ndim == 4 else decay[..., None]
    outputs = []
    for token in range(value.shape[1]):
        current = current * of_rows[:, token, :, :, None]
        added = value[:, token]
        if rate is not None:
            added = (added - torch.einsum("nhk,nhkv->nhv", key[:, token], current)) * rate[:, token, :, None]
        current = current + key[:, token, :, :, None] * added[:, :, None]
        outputs.append(torch.einsum("nhk,nhkv->nhv", query[:, token], current))
    state.copy_(current)
    return torch.stack(outputs, dim=1)


Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]


def mixed(mixer: Mixer, rows: Tensor, states: StepStates, layer: int, recur: Recurrence = recurrence) -> Tensor:
    """Return the input float32 [T, ...] of `mixer.out`, given the products float32 [T, n] with `inputs_of(mixer)`."""
    if isinstance(mixer, DeltaNet):
        mix = partial(_delta_net, mixer, recur)
    elif isinstance(mixer, Mamba2):
        mix = partial(_mamba2, mixer, recur)
    else:
        mix = partial(_short_convolution, mixer)
    return states.mix(layer, rows[None], mix)[0]


def _delta_net(net: DeltaNet, recur: Recurrence, rows: Tensor, states: LayerStates) -> Tensor:
    """Return [sequences, tokens, value heads * value_dim] of a gated delta net (Yang et al. 2024, arXiv:2412.06464).

    The state of a head is a matrix S [key_dim, value_dim]. Each token changes it, and reads it by its query. Its decay
    is one number, or one for each row (Kimi Team 2025, arXiv:2510.26692).
    """
    num_keys = net.key_heads * net.key_dim
    num_values = net.value_heads * net.value_dim
    channels = 2 * num_keys + num_values
    sizes = [channels, num_values, net.value_heads, len(net.speeds)]
    convolved, gates, rates, decays = rows.split(sizes, dim=-1)
    convolved = _convolved(net.convolution, convolved, states)
    query, key, value = convolved.split([num_keys, num_keys, num_values], dim=-1)
    query, key = (_unit_vectors(part.unflatten(-1, (net.key_heads, -1))) for part in (query, key))
    query = query * net.key_dim**-0.5
    value = value.unflatten(-1, (net.value_heads, -1))
    rate = rates.sigmoid() * net.rate_factor
    decay = (net.speeds * softplus(decays + net.biases)).exp()
    if net.decays is not None:
        decay = decay.unflatten(-1, (net.value_heads, -1))
    assert states.recurrent is not None
    gates = gates.unflatten(-1, (net.value_heads, -1))
    gates = gates.sigmoid() if net.has_sigmoid_gates else silu(gates)
    return (net.norm(recur(states.recurrent, decay, key, value, query, rate)) * gates).flatten(-2)


def _unit_vectors(x: Tensor) -> Tensor:
    """Return vectors [..., dim] with length 1."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _mamba2(mixer: Mamba2, recur: Recurrence, rows: Tensor, states: LayerStates) -> Tensor:
    """Return [sequences, tokens, heads * head_dim] of a mixer of Mamba 2 (Dao and Gu 2024, arXiv:2405.21060).

    The state of a head is a matrix S [head_dim, state_dim]. Heads of a group share B and C [state_dim].

        S = decay S + time x B^T        out = S C + skip x
    """
    numbers = mixer.heads * mixer.head_dim
    of_groups = mixer.groups * mixer.state_dim
    convolved, gates, times = rows.split([numbers + 2 * of_groups, numbers, mixer.heads], dim=-1)
    convolved = _convolved(mixer.convolution, convolved, states)
    x, b, c = convolved.split([numbers, of_groups, of_groups], dim=-1)
    x = x.unflatten(-1, (mixer.heads, -1))
    b, c = (part.unflatten(-1, (mixer.groups, -1)) for part in (b, c))
    time = softplus(times + mixer.biases).clamp(mixer.least_time, mixer.most_time)
    decay = (mixer.speeds * time).exp()
    assert states.recurrent is not None
    out = recur(states.recurrent.mT, decay, b, x * time[..., None], c, None) + mixer.skips[:, None] * x
    gated: Tensor = out.flatten(-2) * silu(gates)
    if mixer.norm is None:
        return gated
    of_groups_apart = gated.unflatten(-1, (mixer.groups, -1))
    normed = rms_norm(of_groups_apart, of_groups_apart.shape[-1:], eps=mixer.norm.epsilon)
    return normed.flatten(-2) * mixer.norm.weight


def _short_convolution(mixer: ShortConvolution, rows: Tensor, states: LayerStates) -> Tensor:
    inputs, gates, out_gates = rows.chunk(3, dim=-1)
    return _convolved(mixer.convolution, inputs * gates, states) * out_gates


def _convolved(convolution: Convolution, x: Tensor, states: LayerStates) -> Tensor:
    """Return the convolution of `x` [sequences, tokens, channels], and store its last inputs.

    Inputs are rounded to the dtype of the state, so that the result doesn't depend on how a prompt is split into
    chunks.
    """
    before = states.conv
    known = torch.cat([before, x.mT.to(before.dtype)], dim=-1)  # [sequences, channels, taps + tokens]
    before.copy_(known[..., -before.shape[-1] :])
    inputs = known.float()
    windows = inputs[..., 1:].unfold(-1, len(convolution.weight), 1)  # [sequences, channels, tokens, taps]
    out = torch.einsum("nctk,kc->ntc", windows, convolution.weight).contiguous()
    if convolution.bias is not None:
        out = out + convolution.bias
    if convolution.activation == "none":
        return out
    return ACTIVATIONS[convolution.activation](out)
