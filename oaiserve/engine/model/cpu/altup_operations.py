"""Tells native code the operations of a token's hidden states, where there are several, from their description."""

from __future__ import annotations

import math

from oaiserve.engine.model.cpu import library
from oaiserve.engine.model.cpu.description import AltUp, HiddenStates, Laurel, Norm, NotKnown
from oaiserve.engine.model.cpu.expert_operations import Buffers
from oaiserve.engine.model.cpu.library import MOST_HIDDEN_STATES, Normalize
from oaiserve.engine.model.cpu.operation_list import OperationList


class HiddenStateOperations:
    """Adds the operations of hidden states to those of a decoder, which computes with one of them at a time."""

    def __init__(
        self,
        operations: OperationList,
        states: HiddenStates,
        laurels: list[Laurel],
        buffers: Buffers,
    ) -> None:
        """Make buffers for all states, and for the short vectors of `laurels`. Raises NotKnown for too many states."""
        self._operations, self._library = operations, operations.library
        self._described = states
        self._width, self._hidden, self._normed, self._branch, _ = buffers
        self._number = len(states.projections) + 1
        if self._number > MOST_HIDDEN_STATES:
            raise NotKnown(f"a token has {self._number} hidden states, more than {MOST_HIDDEN_STATES}")
        self._states = [operations.floats(self._width) for _ in range(self._number)]
        if laurels:
            rank = max(len(laurel.product.down.weight) for laurel in laurels)
            self._low, self._short_low = operations.floats(rank), operations.elements(rank)

    def begin(self) -> None:
        """Make all states of the embedding, which is in `hidden`."""
        self._copy(self._hidden, self._states[0])
        self._convert(self._hidden, self._normed)
        for state, matrix in zip(self._states[1:], self._described.projections, strict=True):
            self._operations.project("hidden states", self._normed, state, [matrix])
            self._match(state)

    def predict(self, altup: AltUp) -> None:
        """Predict all states, and write the one that a layer computes with to `hidden`."""
        arguments = (self._states[0], self._hidden, self._numbers(altup))
        self._operations.add("hidden states", self._library.predict, *arguments)

    def correct(self, altup: AltUp) -> None:
        """Correct all states by what a layer has made of `hidden`, which becomes what its input gate reads."""
        arguments = (self._states[0], self._hidden, self._numbers(altup))
        self._operations.add("hidden states", self._library.correct, *arguments)

    def add(self, norm: Norm) -> None:
        """Add the norm of `branch` to all states but the first."""
        arguments = (self._branch, self._states[0], self._number, self._operations.normalize(norm))
        self._operations.add("hidden states", self._library.add_to_states, *arguments)

    def laurel(self, laurel: Laurel) -> None:
        """Add to `hidden` what goes around attention, of which `normed` still has the input."""
        operations, product = self._operations, laurel.product
        operations.add("laurel", self._library.add_rows, self._normed, self._hidden, self._width)
        operations.project("laurel", self._normed, self._low, [product.down])
        rank = Normalize(width=len(product.down.weight))
        operations.add("laurel", self._library.norm, self._low, self._short_low, rank, False)
        operations.project("laurel", self._short_low, self._branch, [product.up])
        arguments = (self._branch, self._hidden, operations.normalize(laurel.norm), 1.0, math.sqrt(0.5))
        operations.add("laurel", self._library.add_norm, *arguments)

    def end(self) -> None:
        """Make one state of all, the mean, in `hidden`."""
        self._copy(self._states[0], self._hidden)
        for number, (state, matrix) in enumerate(
            zip(self._states[1:], self._described.unprojections, strict=True), start=2
        ):
            self._convert(state, self._normed)
            self._operations.project("hidden states", self._normed, self._branch, [matrix])
            self._match(self._branch)
            factor = 1 / self._number if number == self._number else 1.0
            arguments = (self._branch, self._hidden, Normalize(width=self._width), 1.0, factor)
            self._operations.add("hidden states", self._library.add_norm, *arguments)

    def _numbers(self, altup: AltUp) -> library.AltUp:
        keep, scale = self._operations.keep, altup.scale
        tensors = (altup.router, altup.predictions, altup.corrections)
        return library.AltUp(
            self._width,
            self._number,
            self._described.active,
            altup.epsilon,
            *(keep(tensor) for tensor in tensors),
            None if scale is None else keep(scale),
        )

    def _match(self, x: int) -> None:
        self._operations.add("hidden states", self._library.match_length, x, self._states[0], self._width)

    def _copy(self, x: int, out: int) -> None:
        self._operations.add("hidden states", self._library.norm_floats, x, out, Normalize(width=self._width))

    def _convert(self, x: int, out: int) -> None:
        self._operations.add("hidden states", self._library.norm, x, out, Normalize(width=self._width), False)
