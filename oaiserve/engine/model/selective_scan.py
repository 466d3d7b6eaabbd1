"""Mamba's scan of the next tokens of a prompt, from the state that the tokens before have left, in plain torch.

Transformers' code of the first Mamba scans a prompt from an empty state only: it cannot compute a prompt in chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

from oaiserve.engine.model.states import StateCache

# Tokens whose states are in memory at once: [tokens, channels, state size], twice, in float32.
_PIECE = 64


def mix_prompt(mixer: Any, hidden: Tensor, cache: StateCache) -> Tensor:
    """Compute a mixer of the first Mamba for the tokens `hidden` [1, tokens, width] of one sequence."""
    num_tokens, weight = hidden.shape[1], mixer.conv1d.weight
    x, gate = mixer.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)  # [1, channels, tokens] each
    known = cache.update_conv_state(x, mixer.layer_idx)
    x = mixer.act(conv1d(known, weight, mixer.conv1d.bias, groups=len(weight))[..., -num_tokens:]).transpose(1, 2)
    sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
    time_step, b, c = mixer.x_proj(x).split(sizes, dim=-1)
    if hasattr(mixer, "dt_layernorm"):  # of Jamba and FalconMamba
        time_step, b, c = mixer.dt_layernorm(time_step), mixer.b_layernorm(b), mixer.c_layernorm(c)
    state = cache.get_recurrent_state()
    assert state is not None
    out = selective_scan(
        x[0].float(),
        softplus(mixer.dt_proj(time_step[0]).float()),
        -torch.exp(mixer.A_log.float()),
        b[0].float(),
        c[0].float(),
        state[0],
    )
    out = (out + x[0] * mixer.D.float()) * silu(gate[0].T.float())
    return mixer.out_proj(out.to(hidden.dtype))[None]  # type: ignore[no-any-return]


def selective_scan(x: Tensor, time_step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Return the outputs [tokens, channels] of inputs `x` and their time steps, and leave the `state` behind them.

    All is in float32: `a` and `state` are [channels, state size], `b` and `c` [tokens, state size].
    """
    out = torch.empty_like(x)
    before = state
    for first in range(0, len(x), _PIECE):
        piece = slice(first, first + _PIECE)
        decay = torch.exp(time_step[piece, :, None] * a)
        states = (time_step[piece] * x[piece])[..., None] * b[piece, None]  # what each token adds
        for added, kept in zip(states.unbind(), decay.unbind(), strict=True):
            before = added.addcmul_(kept, before)
        out[piece] = torch.bmm(states, c[piece, :, None])[..., 0]
    state.copy_(before)
    return out
