"""The value for each of transformers' model types that sets it apart from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oaiserve.engine.decoder.facts import MakeFacts, llama
from oaiserve.engine.decoder.sources.names import LLAMA, Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    type: str  # transformers' name of it
    facts: MakeFacts = llama
    other_names: Names = field(default_factory=dict)  # of tensors on the hub
    is_transposed: bool = False  # matrices of layers are [k, n] in files on the hub
    has_transposed_experts: bool = False  # tensors of all experts are [experts, k, n] there

    @property
    def names(self) -> Mapping[str, str | tuple[str, ...]]:
        return {**LLAMA, **self.other_names}
