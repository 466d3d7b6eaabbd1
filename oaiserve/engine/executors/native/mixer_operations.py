"""Adds the operations of layers that keep a state to native code's list, from their descriptions."""

from __future__ import annotations

from dataclasses import replace

from oaiserve.engine.decoder import description
from oaiserve.engine.decoder.description import (
    DeltaNet,
    LowRank,
    Mamba2,
    Mixer,
    NotKnown,
)
from oaiserve.engine.executors.native.kv_layout import LANES
from oaiserve.engine.executors.native.library import (
    NONE,
    ConvolvedChannels,
    DeltaHeads,
    GatedNorm,
    Normalize,
    ScanHeads,
)
from oaiserve.engine.executors.native.operation_list import OperationList, whole_lanes

MAX_KEY_DIM = 256  # MAX_STATE_KEY_DIM in src/delta.h


class MixerOperations:
    """Adds the operations of mixers to a decoder's list, in the order of their layers."""

    def __init__(self, operations: OperationList, mixers: list[Mixer]) -> None:
        self._operations = operations
        self._num_layers = 0  # number of layers whose operations have been added
        if mixers:
            # A row holds a token's projections, followed by its decays.
            widths = (
                sum(len(matrix.weight) for matrix in mixer.projections)
                + (mixer.heads if isinstance(mixer, Mamba2) else 0)
                for mixer in mixers
            )
            self._rows = operations.floats(max(map(whole_lanes, widths)))
        if nets := [mixer for mixer in mixers if isinstance(mixer, DeltaNet)]:
            self._rates = operations.floats(max(whole_lanes(2 * net.value_heads) for net in nets))
        if low := [part for net in nets for part in (net.gates, net.decays) if part is not None]:
            rank = max(len(part.down.weight) for part in low)
            self._low = operations.floats(rank)
            self._low_elements = operations.elements(rank)
            self._gates = operations.floats(max(net.value_heads * net.value_dim for net in nets))
            self._decays = operations.floats(max(net.value_heads * net.key_dim for net in nets))

    def add(self, mixer: Mixer, x: int, out: int) -> None:
        """Add the operations of the next layer. They write the input of its last matrix to `out`."""
        self._operations.project("projections", x, self._rows, mixer.projections)
        if isinstance(mixer, DeltaNet):
            self._delta_net(mixer, x, out)
        elif isinstance(mixer, Mamba2):
            self._mamba2(mixer, out)
        else:
            width = mixer.out.weight.shape[1]
            self._convolve(mixer.convolution, before=width, after=2 * width)
            self._operations.add("convolution", "norm", self._rows, out, Normalize.of(None, width), False)
        self._num_layers += 1

    def _delta_net(self, net: DeltaNet, x: int, out: int) -> None:
        operations = self._operations
        _refuse_unless_whole(net.key_dim, net.value_dim)
        if net.key_dim > MAX_KEY_DIM:
            raise NotKnown(f"its states have keys of {net.key_dim} numbers, which are more than {MAX_KEY_DIM}")
        operations.project("projections", x, self._rates, net.rates)
        channels = self._convolve(net.convolution)
        decays = self._rates
        first_decay = net.value_heads
        if net.decays is not None:
            self._low_rank(net.decays, x, self._decays)
            decays = self._decays
            first_decay = 0
        gates = self._rows
        first_gate = channels
        if net.gates is not None:
            self._low_rank(net.gates, x, self._gates)
            gates = self._gates
            first_gate = 0
        sizes = (net.key_heads, net.value_heads, net.key_dim, net.value_dim, first_decay)
        heads = DeltaHeads(*sizes, net.decays is not None, net.rate_factor)
        rows = (self._rows, self._rates, decays)
        operations.add("recurrence", "prepare_delta", *rows, heads, net.speeds, net.biases)
        rule = "delta_rule" if net.decays is None else "delta_rule_by_row"
        operations.add("recurrence", rule, *rows, heads, self._num_layers)
        activation = "sigmoid" if net.has_sigmoid_gates else "silu"
        gated = GatedNorm(channels - net.value_heads * net.value_dim, first_gate, net.value_heads, activation)
        operations.add("recurrence", "gate_and_norm", self._rows, gates, out, gated, Normalize.of(net.norm))

    def _low_rank(self, product: LowRank, x: int, out: int) -> None:
        """Add the operations that write the product of `x` with two matrices to `out`."""
        operations = self._operations
        rank = len(product.down.weight)
        _refuse_unless_whole(rank)
        operations.project("projections", x, self._low, [product.down])
        operations.add("projections", "norm", self._low, self._low_elements, Normalize.of(None, rank), False)
        operations.project("projections", self._low_elements, out, [product.up])

    def _mamba2(self, mixer: Mamba2, out: int) -> None:
        operations = self._operations
        _refuse_unless_whole(mixer.head_dim, mixer.state_dim, mixer.head_dim * mixer.heads // mixer.groups)
        channels = self._convolve(mixer.convolution)
        numbers = mixer.heads * mixer.head_dim
        sizes = (mixer.heads, mixer.head_dim, mixer.groups, mixer.state_dim, channels + numbers)
        heads = ScanHeads(*sizes, mixer.least_time, mixer.most_time)
        operations.add("recurrence", "prepare_scan", self._rows, heads, mixer.speeds, mixer.biases)
        operations.add("recurrence", "scan", self._rows, heads, mixer.skips, self._num_layers)
        gated = GatedNorm(0, channels, mixer.groups, "silu", True, True)
        width = numbers // mixer.groups
        normalize = replace(Normalize.of(mixer.norm, width), width=width)
        operations.add("recurrence", "gate_and_norm", self._rows, self._rows, out, gated, normalize)

    def _convolve(self, convolution: description.Convolution, *, before: int = NONE, after: int = NONE) -> int:
        """Add the convolution of the first numbers of a row, and return how many numbers it covers.

        Those from `before` on multiply its inputs, and those from `after` on its outputs.
        """
        taps, channels = convolution.weight.shape
        if channels % LANES:
            raise NotKnown(f"its convolutions have {channels} channels, which is no multiple of {LANES}")
        parts = (convolution.weight, convolution.bias, convolution.activation)
        convolved = ConvolvedChannels(channels, taps, *parts, before, after, self._num_layers)
        self._operations.add("convolution", "convolve", self._rows, convolved)
        return channels


def _refuse_unless_whole(*dims: int) -> None:
    for dim in dims:
        if dim % LANES:
            raise NotKnown(f"its states have {dim} numbers in a row, which is no multiple of {LANES}")
