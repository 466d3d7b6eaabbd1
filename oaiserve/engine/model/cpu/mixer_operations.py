"""Tells native code the operations of layers that keep a state, from their descriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from oaiserve.engine.model.cpu import description, library
from oaiserve.engine.model.cpu.description import DeltaNet, Matrix, Mixer, Norm, NotKnown
from oaiserve.engine.model.cpu.kv_layout import LANES
from oaiserve.engine.model.cpu.library import ACTIVATIONS, DeltaHeads, GatedNorm, Library, Normalize

NONE = -1  # no numbers of a row
MAX_DIM = 256  # MAX_STATE_KEY_DIM in src/delta.h


class Operations(Protocol):
    """The operations of a decoder so far, to which more can be added."""

    library: Library

    def floats(self, width: int) -> int:
        """Add a buffer with so many numbers of each token. Return its index."""

    def keep(self, tensor: Tensor) -> int:
        """Keep a tensor as long as the decoder. Return where it is in memory."""

    def normalize(self, norm: Norm) -> Normalize:
        """Return a norm as native code takes it."""

    def operation(self, name: str, add: Callable[..., int], *arguments: Any) -> int:
        """Add an operation of the kind `name`."""

    def project(self, name: str, x: int, out: int, matrices: list[Matrix]) -> None:
        """Add the operation that writes the products with all `matrices` to `out`, side by side."""


class MixerOperations:
    """Adds the operations of mixers, in the order of their layers, to those of a decoder."""

    def __init__(self, operations: Operations, mixers: list[Mixer]) -> None:
        """Make the buffers that `mixers` share."""
        self._operations, self._add = operations, operations.library
        self._num_layers = 0  # for which operations have been added
        if mixers:
            self._rows = operations.floats(max(_width(mixer.projections) for mixer in mixers))
            self._rates = operations.floats(max(-(-_width(mixer.rates) // LANES) * LANES for mixer in mixers))

    def add(self, mixer: Mixer, x: int, out: int) -> None:
        """Add the operations of the next layer: they write what its last matrix multiplies to `out`."""
        self._delta_net(mixer, x, out)
        self._num_layers += 1

    def _delta_net(self, net: DeltaNet, x: int, out: int) -> None:
        operations, add = self._operations, self._add
        for dim in (net.key_dim, net.value_dim):
            if dim % LANES or dim > MAX_DIM:
                raise NotKnown(f"its states have {dim} numbers in a row, no multiple of {LANES} up to {MAX_DIM}")
        heads = DeltaHeads(net.key_heads, net.value_heads, net.key_dim, net.value_dim)
        operations.project("projections", x, self._rows, net.projections)
        operations.project("projections", x, self._rates, net.rates)
        channels = self._convolve(net.convolution)
        speeds, biases = operations.keep(net.speeds), operations.keep(net.biases)
        operations.operation("recurrence", add.prepare_delta, self._rows, self._rates, heads, speeds, biases)
        operations.operation("recurrence", add.delta_rule, self._rows, self._rates, heads, self._num_layers)
        gated = GatedNorm(channels - net.value_heads * net.value_dim, channels, net.value_heads)
        normalize = operations.normalize(net.norm)
        operations.operation("recurrence", add.gate_and_norm, self._rows, out, gated, normalize)

    def _convolve(self, convolution: description.Convolution, first: int = 0) -> int:
        """Add the convolution of the numbers of a row from `first` on. Return how many these are."""
        keep, bias = self._operations.keep, convolution.bias
        taps, channels = convolution.weight.shape
        arguments = library.Convolution(
            first,
            channels,
            taps,
            keep(convolution.weight),
            None if bias is None else keep(bias),
            ACTIVATIONS.index(convolution.activation),
            NONE,
            NONE,
            self._num_layers,
        )
        self._operations.operation("convolution", self._add.convolve, self._rows, arguments)
        return channels


def matrices_of(mixer: Mixer) -> list[Matrix]:
    """Return the matrices of a mixer, which may be in blocks."""
    return [*mixer.projections, *mixer.rates, mixer.out]


def _width(matrices: list[Matrix]) -> int:
    return sum(len(matrix.weight) for matrix in matrices)
