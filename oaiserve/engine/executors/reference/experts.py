"""MLPs, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import MLP, ClampedGate, Expert, Experts
from oaiserve.engine.executors.reference.products import Products, product
from oaiserve.engine.model.layer_operations import ACTIVATIONS


def mlp_output(mlp: MLP, x: Tensor, products: Products) -> Tensor:
    """Return the output float32 [T, width] of an MLP for the normed hidden state [T, width]."""
    up = products(x, mlp.up)
    activation = ACTIVATIONS[mlp.activation]
    if mlp.gate is None:
        return products(activation(up), mlp.down)
    gate = products(x, mlp.gate)
    if mlp.cutoff is not None:
        least = gate.mean(-1, keepdim=True) + mlp.cutoff * gate.std(-1, keepdim=True, correction=0)
        gate = (gate - least).relu()
    return products(activation(gate) * up, mlp.down)


def mixture_output(mixture: Experts, x: Tensor, hidden: Tensor, products: Products) -> Tensor:
    """Return the output float32 [T, width] of a mixture of experts.

    `x` is the normed hidden state. If the router and the experts have norms of their own, each applies its norm to
    `hidden` instead.
    """
    norms = mixture.norms
    router = mixture.router
    weights = router.weights(products(x if norms is None else norms.router(hidden), router.matrix))
    out = experts_output(mixture, mixture.experts.__getitem__, x if norms is None else norms.experts(hidden), weights)
    if norms is not None:
        out = norms.experts_out(out)
    if mixture.shared is None:
        return out
    shared = mlp_output(mixture.shared, x, products)
    if mixture.shared_gate is not None:
        shared = shared * products(x, mixture.shared_gate).sigmoid()
    return out + (shared if norms is None else norms.shared_out(shared))


def experts_output(mixture: Experts, expert_of: Callable[[int], Expert], x: Tensor, weights: Tensor) -> Tensor:
    """Return the sum float32 [T, width] of the chosen experts' outputs, weighted by `weights` [T, experts].

    The shapes of an expert's products depend on its number of tokens, so the host waits for the device here.
    """
    out = torch.zeros_like(x)
    is_chosen = weights.T != 0
    counts = is_chosen.sum(1).tolist()
    tokens = is_chosen.nonzero()[:, 1].split(counts)
    for number, rows in enumerate(tokens):
        if len(rows):
            expert = expert_of(number)
            own = x[rows]
            own_weights = weights[rows, number, None]
            if mixture.scales_inputs:
                own = own * own_weights
            added = product(_inner(mixture.activation, own, expert), expert.down)
            out.index_add_(0, rows, added if mixture.scales_inputs else added * own_weights)
    return out


def _inner(way: str | ClampedGate, x: Tensor, expert: Expert) -> Tensor:
    up = product(x, expert.up)
    if expert.gate is None:
        assert isinstance(way, str)
        return ACTIVATIONS[way](up)
    gate = product(x, expert.gate)
    if isinstance(way, ClampedGate):
        return way(gate, up)
    return ACTIVATIONS[way](gate) * up
