"""Brings the pool of states to the layers of transformers' models that keep one.

Their parts that do are called *mixers*. Transformers hands each of them a cache with the states of a batch in which all
sequences have equally many tokens. Here, a mixer is called for all decodes of a step, and for each of its prompts, with
the states of these in place of such a cache. Whether a model then computes the same is checked when it is loaded.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from oaiserve.engine.model.attention.foreign import Handed
from oaiserve.engine.model.selective_scan import mix_prompt
from oaiserve.engine.model.spec import LayerStateShapes, StateShape
from oaiserve.engine.model.states import StateCache

# The model types that can be served with states, and the class of their mixers.
MIXERS = {
    "bamba": "BambaMixer",
    "falcon_h1": "FalconH1Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer",
    "jamba": "JambaMambaMixer",
    "kimi_linear": "KimiLinearDeltaAttention",
    "lfm2": "Lfm2ShortConv",
    "lfm2_moe": "Lfm2MoeShortConv",
    "lfm3": "Lfm3ShortConv",
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet",
    "qwen3_5_text": "Qwen3_5GatedDeltaNet",
    "qwen3_next": "Qwen3NextGatedDeltaNet",
    "zamba2": "Zamba2MambaMixer",
}
# Of the first Mamba. Their own code scans a prompt from an empty state only.
_SCANNING = {"FalconMambaMixer", "JambaMambaMixer", "MambaMixer"}


def bring_states(model: PreTrainedModel) -> None:
    """Let the mixers of a model, whose type is one of MIXERS, compute with the states of a step."""
    handed = Handed()
    for module in model.modules():
        name = type(module).__name__
        if name == MIXERS[model.config.model_type]:
            _bring(module, handed)
        elif name == "Zamba2HybridLayer":
            # Its attention is told the number of its layer in each call only.
            module.shared_transformer.self_attn.layer_idx = module.mamba_decoder.layer_idx  # type: ignore[union-attr]
    handed.take_from(model)


def _bring(mixer: Any, handed: Handed) -> None:
    compute = mixer.forward
    parameters = signature(compute).parameters
    name_of_cache = "cache_params" if "cache_params" in parameters else "past_key_values"
    scans = type(mixer).__name__ in _SCANNING

    def mix(hidden: Tensor, cache: StateCache) -> Tensor:
        if scans and hidden.shape[1] > 1:
            return mix_prompt(mixer, hidden, cache)
        return compute(hidden, **{name_of_cache: cache})  # type: ignore[no-any-return]

    def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        states = handed.call.states
        assert states is not None
        return states.mix(mixer.layer_idx, hidden_states, mix)

    mixer.forward = forward


def state_shapes(output: Any) -> dict[int, LayerStateShapes]:
    """Return the shapes of the states that a model has left in transformers' cache, by layer, given its `output`."""
    cache = output.past_key_values if hasattr(output, "past_key_values") else output.cache_params

    def shape(states: dict[int, Tensor | None]) -> StateShape | None:
        (state,) = states.values()  # no type of MIXERS has several
        return None if state is None else StateShape(tuple(state.shape[1:]), state.dtype)

    return {
        index: LayerStateShapes(shape(layer.conv_states), shape(layer.recurrent_states))
        for index, layer in enumerate(cache.layers)
        if hasattr(layer, "conv_states")
    }
