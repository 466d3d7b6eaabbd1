"""Describes what Gemma 3n has around its layers: several hidden states of a token, and a way around attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from oaiserve.engine.model.cpu.description import AltUp, HiddenStates, Laurel, LowRank, NotKnown
from oaiserve.engine.model.cpu.module_reader import ModuleReader


def hidden_states(reader: ModuleReader, base: Module) -> HiddenStates | None:
    """Describe the hidden states of a token, if there are several. Raises NotKnown."""
    if (made := reader.child(base, "altup_projections", optional=True)) is None:
        return None
    ended = reader.child(base, "altup_unembed_projections")
    return HiddenStates(
        projections=[reader.matrix(module) for module in made],
        unprojections=[reader.matrix(module) for module in ended],
        active=int(reader.loaded.model.config.altup_active_idx),
    )


def altup(reader: ModuleReader, layer: Module) -> AltUp | None:
    """Describe how a layer changes all hidden states, if there are several. Raises NotKnown."""
    if (module := reader.child(layer, "altup", optional=True)) is None:
        return None
    norm = reader.norm(module.router_norm)
    if norm.bias is not None or norm.subtracts_mean:
        raise NotKnown(f"it has norms of type {type(module.router_norm).__name__}")
    router, predictions, corrections = (
        reader.tensor(linear).float()
        for linear in (module.modality_router, module.prediction_coefs, module.correction_coefs)
    )
    scale = reader.parameter(module, "correct_output_scale").float()
    return AltUp(
        epsilon=norm.epsilon,
        router=router * norm.weight * float(module.router_input_scale),
        predictions=predictions,
        corrections=corrections,
        scale=scale if reader.loaded.model.config.altup_correct_scale else None,
    )


def laurel(reader: ModuleReader, layer: Module) -> Laurel | None:
    """Describe a layer's way around attention, if it has one. Raises NotKnown."""
    if (module := reader.child(layer, "laurel", optional=True)) is None:
        return None
    product = LowRank(reader.matrix(module.linear_left), reader.matrix(module.linear_right))
    return Laurel(product, reader.norm(module.post_laurel_norm))


def cutoff(mlp: Any) -> float | None:
    """Return how many standard deviations above their mean the gates of an MLP are that it does not leave out."""
    share = float(getattr(mlp, "activation_sparsity", 0.0))  # of gates that are left out, if they are distributed so
    return float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share))) if share > 0 else None
