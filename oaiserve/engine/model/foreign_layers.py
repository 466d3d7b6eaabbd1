"""Brings paged attention, and the pool of states, to layers of transformers' models that do not ask for them.

Some families' code does not hand the arguments of attention on, or computes attention by itself. Modules with states
are called *mixers*: transformers hands each a cache with the states of a batch in which all sequences have equally many
tokens. Here, a mixer is called for all decodes of a step, and for each of its prompts, with their states in place of
that cache. Whether a model then computes the same is checked when it is loaded, as for all families.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers import PreTrainedModel

from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.own_attention import Handed
from oaiserve.engine.model.spec import LayerStateShapes, StateShape
from oaiserve.engine.model.states import StateCache

# Tokens whose states are in memory at once: [tokens, channels, state size], twice, in float32.
_PIECE = 64


def bring_paged_attention(model: PreTrainedModel) -> None:
    """Change attention modules where their family needs it."""
    handed, family = Handed(), family_of(model.config.model_type)
    changed = [
        family.attention[name](module, model, handed)
        for module in model.modules()
        if (name := type(module).__name__) in family.attention
    ]
    if any(changed):
        handed.take_from(model)


def share_caches(model: PreTrainedModel) -> int:
    """Let layers with keys and values of another layer use its cache. Return their number."""
    stored: dict[str, int] = {}  # the layer that others take from, by their type
    num_sharing = 0
    for module in model.modules():
        of_layer: Any = module
        if getattr(module, "store_full_length_kv", False):
            stored[of_layer.layer_type] = of_layer.layer_idx
        elif getattr(module, "is_kv_shared_layer", False):
            of_layer.layer_idx = stored[of_layer.layer_type]
            num_sharing += 1
    return num_sharing


def bring_states(model: PreTrainedModel) -> None:
    """Let the mixers of a model compute with the states of a step."""
    handed, family = Handed(), family_of(model.config.model_type)
    for module in model.modules():
        if type(module).__name__ == family.mixer:
            _bring_states(module, handed, scans_from_zeros=family.scans_from_zeros)
    handed.take_from(model)


def _bring_states(mixer: Any, handed: Handed, *, scans_from_zeros: bool) -> None:
    compute = mixer.forward
    parameters = signature(compute).parameters
    name_of_cache = "cache_params" if "cache_params" in parameters else "past_key_values"

    def mix(hidden: Tensor, cache: StateCache) -> Tensor:
        if scans_from_zeros and hidden.shape[1] > 1:
            return mix_prompt(mixer, hidden, cache)
        return compute(hidden, **{name_of_cache: cache})  # type: ignore[no-any-return]

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        states = handed.call.states
        assert states is not None
        return states.mix(mixer.layer_idx, hidden_states, mix)

    mixer.forward = forward


def state_shapes(output: Any) -> dict[int, LayerStateShapes]:
    """Return the shapes of the states in transformers' cache after a model's `output`, by layer."""
    cache = output.past_key_values if hasattr(output, "past_key_values") else output.cache_params

    def shape(states: dict[int, Tensor | None]) -> StateShape | None:
        (state,) = states.values()  # no family has several
        return None if state is None else StateShape(tuple(state.shape[1:]), state.dtype)

    return {
        index: LayerStateShapes(shape(layer.conv_states), shape(layer.recurrent_states))
        for index, layer in enumerate(cache.layers)
        if hasattr(layer, "conv_states")
    }


def mix_prompt(mixer: Any, hidden: Tensor, cache: StateCache) -> Tensor:
    """Compute a mixer of the first Mamba for the tokens `hidden` [1, tokens, width] of one sequence.

    Transformers' code scans a prompt from an empty state only: it cannot compute a prompt in chunks.
    """
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
