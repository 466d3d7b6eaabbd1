"""Brings the pool of states to the layers of transformers' models with states.

Their modules with states are called *mixers*. Transformers hands each of them a cache with the states of a batch in
which all sequences have equally many tokens. Here, a mixer is called for all decodes of a step, and for each of its
prompts, with their states in place of that cache. The model's results are compared when it is loaded.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.own_attention import Handed
from oaiserve.engine.model.selective_scan import mix_prompt
from oaiserve.engine.model.spec import LayerStateShapes, StateShape
from oaiserve.engine.model.states import StateCache


def bring_states(model: PreTrainedModel) -> None:
    """Let the mixers of a model compute with the states of a step."""
    handed, family = Handed(), family_of(model.config.model_type)
    for module in model.modules():
        if type(module).__name__ == family.mixer:
            _bring(module, handed, scans_from_zeros=family.scans_from_zeros)
    handed.take_from(model)


def _bring(mixer: Any, handed: Handed, *, scans_from_zeros: bool) -> None:
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
