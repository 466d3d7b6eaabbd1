"""Computes several hidden states per token (alternating updates, Baykal et al. 2023, arXiv:2301.13310).

A layer predicts all states, computes its output from the active one, and corrects all states by that output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import AltUp, HiddenStates
from oaiserve.engine.executors.reference.products import Products

_LEAST = 1e-5  # lower bound of the mean square of a projected state


def first_states(states: HiddenStates, hidden: Tensor, products: Products) -> Tensor:
    """Return the states float32 [states, T, width] before the first layer, given the embedded tokens [T, width]."""
    others = [_like(products(hidden, matrix), hidden) for matrix in states.projections]
    return torch.stack([hidden, *others])


def last_state(states: HiddenStates, hidden: Tensor, products: Products) -> Tensor:
    """Return the input float32 [T, width] of the final norm, given the states [states, T, width]."""
    first = hidden[0]
    others = zip(hidden[1:], states.unprojections, strict=True)
    return torch.stack([first, *(_like(products(one, matrix), first) for one, matrix in others)]).mean(0)


def predicted(altup: AltUp, hidden: Tensor, active: int, products: Products) -> Tensor:
    """Return the predicted states [states, T, width] of a layer, given those after the previous layer."""
    coefficients = products(_routed(altup, hidden[active], products), altup.predictions)
    to_from = coefficients.unflatten(-1, (len(hidden), len(hidden)))
    return hidden + torch.einsum("tij,jtw->itw", to_from, hidden)


def corrected(altup: AltUp, hidden: Tensor, output: Tensor, active: int, products: Products) -> Tensor:
    """Return the predicted states [states, T, width], corrected by the layer's output [T, width]."""
    factors = products(_routed(altup, output, products), altup.corrections) + 1
    return hidden + factors.T[..., None] * (output - hidden[active])


def _routed(altup: AltUp, hidden: Tensor, products: Products) -> Tensor:
    return products(altup.norm(hidden), altup.router).tanh()


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Scale the rows of `x` to the magnitudes of the rows of `other`."""
    magnitude = other.square().mean(-1, keepdim=True).sqrt()
    return x * magnitude / x.square().mean(-1, keepdim=True).clamp(min=_LEAST).sqrt()
