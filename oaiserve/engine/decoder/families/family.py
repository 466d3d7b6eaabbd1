"""`Family` describes how one of transformers' model types differs from Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oaiserve.engine.decoder.dense import Rotary, attention
from oaiserve.engine.decoder.description import Attention, HiddenStates, Layer, LayerInputs, Mixer
from oaiserve.engine.decoder.facts import Facts, MakeFacts, llama
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.names import LLAMA, Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    type: str  # transformers' name of the type, or another value of `model_type` in config.json
    like: str = ""  # the type whose settings and defaults this one uses, if transformers doesn't have the type
    facts: MakeFacts = llama
    other_names: Names = field(default_factory=dict)  # other names of tensors on the hub
    is_transposed: bool = False  # matrices of layers are [k, n] in files on the hub
    has_transposed_experts: bool = False  # tensors of all experts are [experts, k, n] there
    attention: Callable[[Reader, Facts, Settings, Rotary, int], Attention] = attention  # called with the layer's number
    mixer: Callable[[Reader, Facts, Settings], Mixer] | None = None  # called with a reader at a layer's `mixer`
    # Changes a layer that was described like Llama's. The reader is at the layer.
    adjust: Callable[[Layer, Reader, Facts, Settings], Layer] | None = None
    layer_inputs: Callable[[Reader, Facts, Settings], LayerInputs | None] | None = None
    hidden_states: Callable[[Reader, Settings], HiddenStates] | None = None

    @property
    def names(self) -> Mapping[str, str | tuple[str, ...]]:
        return {**LLAMA, **self.other_names}
