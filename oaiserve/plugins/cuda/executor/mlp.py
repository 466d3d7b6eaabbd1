"""MLPs, mixtures of experts, and mixers with states. Matrices that read the same input are joined into one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import (
    MLP,
    ClampedGate,
    DeltaNet,
    Expert,
    Experts,
    Matrix,
    Mixer,
    MixtureNorms,
)
from oaiserve.engine.executors.reference.experts import experts_output
from oaiserve.engine.executors.reference.mixers import inputs_of, mixed
from oaiserve.plugins.cuda.executor.attention import CudaStep
from oaiserve.plugins.cuda.executor.device_matrices import ExpertMatrices
from oaiserve.plugins.cuda.executor.kernels import Kernels
from oaiserve.plugins.cuda.executor.place import PLACED, JoiningPlacing


class MLPLayer:
    """An MLP, with one product for gate and up."""

    def __init__(self, mlp: MLP, placing: JoiningPlacing) -> None:
        self._inputs = placing.joined(_inputs(mlp.gate, mlp.up))
        self._down = placing.joined([mlp.down])
        self._activation = mlp.activation
        self._is_gated = mlp.gate is not None

    def __call__(self, x: Tensor, hidden: Tensor, step: CudaStep) -> tuple[Tensor, ...]:
        """Return the terms [T, width] of the output, given the hidden state [T, width] and its norm `x`."""
        both = step.products.joined(x, self._inputs)
        rounded = step.new_rounded(both.shape[1] // (1 + self._is_gated), in_groups=True)
        inner = step.kernels.operations.activate(both, self._activation, is_gated=self._is_gated, rounded=rounded)
        step.products.keep(inner, rounded)
        return (step.products.joined(inner, self._down),)


class MixtureLayer:
    """A mixture of experts. Without kernels, torch computes the experts in turn, and the host waits for each."""

    def __init__(self, mixture: Experts, placing: JoiningPlacing) -> None:
        experts = mixture.experts
        self._is_gated = experts[0].gate is not None
        self._gate_up = placing.stacked([_inputs(one.gate, one.up) for one in experts])
        self._down = placing.stacked([[one.down] for one in experts])
        self._shared: MLPLayer | None = None
        if mixture.shared is not None:
            self._shared = MLPLayer(mixture.shared, placing)
        self._mixture: Experts = placing.part(replace(mixture, experts=[], shared=None))

    def __call__(self, x: Tensor, hidden: Tensor, step: CudaStep) -> tuple[Tensor, ...]:
        """Return the terms [T, width] of the output, given the hidden state [T, width] and its norm `x`."""
        mixture = self._mixture
        norms = mixture.norms
        read_by_router = x
        read_by_experts = x
        if norms is not None:
            in_float32 = hidden.float()
            read_by_router = norms.router(in_float32)
            read_by_experts = norms.experts(in_float32).to(x.dtype)
        chosen, weights = mixture.router.choose(step.products(read_by_router, mixture.router.matrix))
        if step.kernels.experts is None:
            of_all = weights.new_zeros(len(x), len(self._gate_up.codes)).scatter(-1, chosen, weights)
            out = experts_output(mixture, partial(self._expert, x.dtype), read_by_experts.float(), of_all).to(x.dtype)
        else:
            out = self._by_kernels(step.kernels, read_by_experts, chosen, weights)
        if norms is not None:
            out = norms.experts_out(out.float()).to(x.dtype)
        return out, *self._shared_output(x, hidden, norms, step)

    def _shared_output(
        self, x: Tensor, hidden: Tensor, norms: MixtureNorms | None, step: CudaStep
    ) -> tuple[Tensor, ...]:
        if self._shared is None:
            return ()
        (shared,) = self._shared(x, hidden, step)
        if self._mixture.shared_gate is not None:
            shared = shared * step.products(x, self._mixture.shared_gate).sigmoid().to(x.dtype)
        if norms is not None:
            shared = norms.shared_out(shared.float()).to(x.dtype)
        return (shared,)

    def _expert(self, dtype: torch.dtype, number: int) -> Expert:
        """Return the matrices of an expert, expanded."""
        *gates, up = _matrices(self._gate_up, number, dtype, 1 + self._is_gated)
        (down,) = _matrices(self._down, number, dtype, 1)
        return Expert(next(iter(gates), None), up, down)

    def _by_kernels(self, kernels: Kernels, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum [T, width] of the outputs of the chosen experts int64 [T, top_k], weighted."""
        experts = kernels.experts
        activate = kernels.operations.activate
        assert experts is not None
        num_tokens, top_k = chosen.shape
        plan = experts.planned(chosen, len(self._gate_up.codes), kernels.ways)
        factors: Tensor | None = weights
        if self._mixture.scales_inputs:  # each pair of a token and an expert has its own row
            x = (x[:, None] * weights[..., None].to(x.dtype)).flatten(0, 1)
            top_k = 1
            factors = None
        both = experts.product(x, self._gate_up, plan, pairs_of_row=top_k, factors=None)
        activation = self._mixture.activation
        if isinstance(activation, ClampedGate):
            inner = activate(both, "clamped", is_gated=True, alpha=activation.alpha, limit=activation.limit)
        else:
            inner = activate(both, activation, is_gated=self._is_gated)
        outs = experts.product(inner, self._down, plan, pairs_of_row=1, factors=factors)
        summed: Tensor = outs.view(num_tokens, -1, outs.shape[1]).sum(1)
        return summed


def _inputs(gate: Matrix | None, up: Matrix) -> list[Matrix]:
    """Return the matrices that multiply the input of an MLP, in the order of `activate`."""
    if gate is None:
        return [up]
    return [gate, up]


def _matrices(matrices: ExpertMatrices, number: int, dtype: torch.dtype, count: int) -> list[Matrix]:
    """Return the matrix of one expert, expanded, in `count` parts of the same height."""
    weights = matrices.of(number).expand(dtype).chunk(count)
    biases: Sequence[Tensor | None] = [None] * count
    if matrices.bias is not None:
        biases = matrices.bias[number].chunk(count)
    return [Matrix(*both) for both in zip(weights, biases, strict=True)]


class MixerLayer:
    """A mixer with states. The reference computes it, except for its products and its recurrence."""

    def __init__(self, mixer: Mixer, placing: JoiningPlacing, layer: int) -> None:
        matrices = [part for part in inputs_of(mixer) if isinstance(part, Matrix)]  # `CudaWeights` refuses other types.
        self._inputs = placing.joined(matrices)
        self._out = placing.joined([mixer.out])
        emptied = replace(mixer, projections=[], out=PLACED)
        if isinstance(emptied, DeltaNet):
            emptied = replace(emptied, rates=[])
        self._mixer: Mixer = placing.part(emptied)
        self._layer = layer

    def __call__(self, x: Tensor, step: CudaStep) -> Tensor:
        """Return the output [T, width] for the normed hidden state [T, width]."""
        assert step.batch.states is not None
        rows = step.products.joined(x, self._inputs).float()
        out = mixed(self._mixer, rows, step.batch.states, self._layer, step.kernels.recurrence)
        return step.products.joined(out.to(x.dtype), self._out)
