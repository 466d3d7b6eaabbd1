"""Stores the states of all sequences, and provides each layer with the states of a step.

A layer with states does not look back at its sequence, as attention does. Its only memory of earlier tokens is a state
of fixed size, which each token changes. So each prompt of a step is computed separately, and all decodes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from oaiserve.engine.decoder.spec import LayerStateShapes, ModelSpec, StateShape
from oaiserve.engine.model.kv_cache import zeroed
from oaiserve.engine.model.transfer import on_device


class LayerStates(NamedTuple):
    conv: Tensor  # [num_states, channels, kernel size]
    recurrent: Tensor | None  # [num_states, ...]

    def at(self, places: slice | Tensor) -> LayerStates:
        """Return the states at these indices: views, or copies if `places` is a tensor."""
        return LayerStates(self.conv[places], None if self.recurrent is None else self.recurrent[places])


class StateChunk(NamedTuple):
    """The chunk of a sequence with a state: `num_tokens` tokens from `start` on."""

    state: int
    start: int
    num_tokens: int


class KeptStates(Protocol):
    """States of sequences between steps, by index: tensors, or other objects of an executor."""

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy states (from, to), in this order."""

    def of_step(self, parts: list[StateChunk]) -> StepStates:
        """Return the states of a step. Sequences with one token come first."""


class States:
    def __init__(self, shapes: Mapping[int, LayerStateShapes], num_states: int, device: torch.device) -> None:
        def tensor(state: StateShape) -> Tensor:
            return zeroed((num_states, *state.shape), state.dtype, device)

        self._layers = {
            layer: LayerStates(tensor(shape.conv), None if shape.recurrent is None else tensor(shape.recurrent))
            for layer, shape in shapes.items()
        }
        self._tensors = [tensor for layer in self._layers.values() for tensor in layer if tensor is not None]
        self._device = device
        self.last = num_states - 1

    @classmethod
    def of(cls, spec: ModelSpec, num_states: int) -> Self | None:
        """Return the states of a model, or None if its layers have none."""
        if not spec.state_shapes:
            return None
        return cls(spec.state_shapes, num_states, spec.device)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy states (from, to), in this order. This needs no memory."""
        for source, target in copies:
            for tensor in self._tensors:
                tensor[target].copy_(tensor[source])

    def of_step(self, parts: list[StateChunk]) -> StepStates:
        """Return the states of a step. Sequences with one token come first. New sequences begin with zeros."""
        self.begin([part.state for part in parts if part.start == 0])
        decodes = [part.state for part in parts if part.num_tokens == 1]
        # Adjacent states in ascending order are changed in place. Others are gathered, and written back.
        first = decodes[0] if decodes else 0
        end = first + len(decodes)
        chosen = slice(first, end) if decodes == [*range(first, end)] else on_device(decodes, self._device)
        return StepStates(self._layers, chosen, len(decodes), parts[len(decodes) :], [part.state for part in parts])

    def of_rows(self, places: Tensor) -> StepStates:
        """Return the states of sequences with one token each. Their indices are read when layers are computed."""
        return StepStates(self._layers, places, len(places))

    def begin(self, places: list[int]) -> None:
        if places:
            indices = on_device(places, self._device)
            for tensor in self._tensors:
                tensor.index_fill_(0, indices, 0)


# Computes sequences with the same number of tokens, [sequences, tokens, width], and changes their states.
Mixer = Callable[[Tensor, LayerStates], Tensor]


class StepStates:
    def __init__(
        self,
        layers: Mapping[int, LayerStates],
        decodes: slice | Tensor,  # indices of the decodes' states in the pool
        num_decodes: int,
        prompts: Sequence[StateChunk] = (),
        places: Sequence[int] = (),  # the indices of all sequences' states in order, if the host has them
    ) -> None:
        self._layers = layers
        self.places = places
        self._num_decodes = num_decodes
        self._decodes = decodes
        self._prompts = prompts

    def addresses(self) -> list[int]:
        """Return the addresses of both state tensors, layer by layer, with 0 for a missing tensor."""
        return [0 if tensor is None else tensor.data_ptr() for layer in self._layers.values() for tensor in layer]

    def mix(self, layer: int, hidden: Tensor, mixer: Mixer) -> Tensor:
        """Compute a layer for all tokens of the step, [1, tokens, width], prompts one by one and decodes together."""
        states = self._layers[layer]
        out = []
        if num_decodes := self._num_decodes:
            chosen = states.at(self._decodes)
            out.append(mixer(hidden[0, :num_decodes, None], chosen)[:, 0])
            if isinstance(self._decodes, Tensor):
                for tensor, changed in zip(states, chosen, strict=True):
                    if tensor is not None and changed is not None:
                        tensor.index_copy_(0, self._decodes, changed)
        first = num_decodes
        for state, _, num_tokens in self._prompts:
            own = states.at(slice(state, state + 1))
            out.append(mixer(hidden[:, first : first + num_tokens], own)[0])
            first += num_tokens
        return torch.cat(out)[None]
