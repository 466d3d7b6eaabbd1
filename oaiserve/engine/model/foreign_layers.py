"""Brings paged attention, and the pool of states, to layers of transformers' models that do not ask for them.

Some families' code does not hand the arguments of attention on, or computes attention by itself. Modules with states
are called *mixers*: transformers hands each a cache with the states of a batch in which all sequences have equally many
tokens. Here, a mixer is called for all decodes of a step, and for each of its prompts, with their states in place of
that cache. Whether a model then computes the same is checked when it is loaded, as for all families.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import Cache, PreTrainedModel

from oaiserve.engine.decoder.spec import LayerStateShapes, StateShape
from oaiserve.engine.model.families import family_of
from oaiserve.engine.model.families.own_attention import Handed
from oaiserve.engine.model.states import StateCache


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
            _bring_states(module, handed)
    handed.take_from(model)


def _bring_states(mixer: Any, handed: Handed) -> None:
    compute = mixer.forward
    # Versions of transformers, and families, give this parameter different names.
    (name_of_cache,) = (
        name for name, parameter in signature(compute).parameters.items() if parameter.annotation == Cache | None
    )

    def mix(hidden: Tensor, cache: StateCache) -> Tensor:
        return compute(hidden, **{name_of_cache: cache})  # type: ignore[no-any-return]

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        states = handed.call.states
        assert states is not None
        return states.mix(mixer.layer_idx, hidden_states, mix)

    mixer.forward = forward


def state_shapes(output: Any) -> dict[int, LayerStateShapes]:
    """Return the shapes of the states in transformers' cache after a model's `output`, by layer."""
    cache: Any = next(value for value in output.values() if isinstance(value, Cache))

    def shape(states: dict[int, Tensor | None]) -> StateShape | None:
        (state,) = states.values()  # no family has several
        return None if state is None else StateShape(tuple(state.shape[1:]), state.dtype)

    return {
        index: LayerStateShapes(shape(layer.conv_states), shape(layer.recurrent_states))
        for index, layer in enumerate(cache.layers)
        if hasattr(layer, "conv_states")
    }
