"""Describes mixtures of experts, and finds out from their outputs how they route tokens and combine gate and up.

`describe.py` reads the rest of a model, and its checks are for these parts, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import (
    MLP,
    ClampedGate,
    Expert,
    Experts,
    Matrix,
    MixtureNorms,
    Norm,
    NotKnown,
    Router,
)
from oaiserve.engine.model.cpu.module_reader import ModuleReader, unscaled_norm
from oaiserve.engine.model.layer_operations import combination
from oaiserve.engine.model.loaded import is_linear

_BIASES = ("e_score_correction_bias", "expert_bias")  # of a router's choice


def mixture(reader: ModuleReader, module: Module, shared: MLP | None) -> Experts:
    """Describe a mixture of experts, with a shared MLP."""
    experts = reader.child(module, "experts")
    return Experts(
        router=_router(reader, module),
        experts=_experts(reader, experts),
        activation=_gating(reader, experts),
        shared=shared,
        shared_gate=reader.matrix_of(module, "shared_expert_gate"),
    )


def mixture_beside(reader: ModuleReader, layer: Module, shared: MLP) -> Experts:
    """Describe experts beside an MLP that all tokens share, where both have norms of their own."""
    router, experts = reader.child(layer, "router"), reader.child(layer, "experts")
    scale = reader.parameter(router, "scale").float() * float(reader.child(router, "scalar_root_size"))
    norm = replace(unscaled_norm(reader.child(router, "norm"), len(scale)), weight=scale)
    return Experts(
        router=_router(reader, layer, norm),
        experts=_experts(reader, experts),
        activation=_gating(reader, experts),
        shared=shared,
        norms=MixtureNorms(
            router=norm,
            experts=reader.norm(reader.child(layer, "pre_feedforward_layernorm_2")),
            experts_out=reader.norm(reader.child(layer, "post_feedforward_layernorm_2")),
            shared_out=reader.norm(reader.child(layer, "post_feedforward_layernorm_1")),
        ),
    )


def _experts(reader: ModuleReader, experts: Module) -> list[Expert]:
    downs = _matrices(reader, experts, "down_proj", 1)
    gates_and_ups = _matrices(reader, experts, "gate_up_proj", 2)
    return [Expert(gate, up, down) for (gate, up), (down,) in zip(gates_and_ups, downs, strict=True)]


def _matrices(reader: ModuleReader, experts: Module, name: str, parts: int) -> list[list[Matrix]]:
    """Return the matrices of each expert under this name: a gate and an up projection if there are two."""
    tensor = reader.tensor(experts, name)
    is_interleaved = not getattr(experts, "is_concatenated", True)

    def cut(rows: Tensor) -> list[Tensor]:
        return [rows[part::parts] for part in range(parts)] if is_interleaved else list(rows.chunk(parts))

    weights: Sequence[Sequence[Tensor | Blocks]]
    biases: Sequence[Sequence[Tensor | None]]
    if (kept := reader.expert_blocks(experts, name)) is not None:
        weights = kept
    else:
        weights = [cut(rows) for rows in (tensor.mT if _are_transposed(experts) else tensor)]
    if getattr(experts, f"{name}_bias", None) is None:
        biases = [[None] * parts] * len(weights)
    else:
        biases = [cut(rows) for rows in reader.parameter(experts, f"{name}_bias").float()]
    return [
        [Matrix(weight, bias) for weight, bias in zip(own, own_biases, strict=True)]
        for own, own_biases in zip(weights, biases, strict=True)
    ]


def _are_transposed(experts: Any) -> bool:
    """Detect experts with transposed matrices; those with gates need not declare it."""
    told: bool | None = getattr(experts, "is_transposed", None)
    return experts.gate_up_proj.shape[2] == 2 * experts.down_proj.shape[1] if told is None else told


def _gating(reader: ModuleReader, experts: Any) -> str | ClampedGate:
    if not hasattr(experts, "_apply_gate"):
        return reader.activation(reader.child(experts, "act_fn"))
    if (found := combination(experts)) is None:
        raise NotKnown(f"its {type(experts).__name__} combines gate and up in another way")
    return found


def _router(reader: ModuleReader, mlp: Module, norm: Norm | None = None) -> Router:
    """Find the rules of a router, whose inputs have this `norm`, by its outputs: names differ by family."""
    router: Any = reader.child(mlp, "gate", "router")
    linear = reader.child(router, "wg", "proj", optional=True) or router
    weight = reader.parameter(linear, "weight")
    bias = None
    for module, name in product((mlp, *router.modules()), _BIASES):
        if reader.child(module, name, optional=True) is not None:
            bias = reader.parameter(module, name).float().flatten()
    groups = int(reader.child(router, "num_group", optional=True) or 1)
    top_k = reader.child(router, "top_k", optional=True) or getattr(reader.loaded.model.config, "top_k_experts", None)
    if top_k is None:
        raise NotKnown(f"its {type(router).__name__} has no top_k")
    plain = Router(
        weight=weight,
        module=reader.name_of(linear) if is_linear(linear) else "",
        logits_bias=reader.floats(linear, "bias"),
        bias=bias,
        top_k=int(top_k),
        groups=groups,
        top_groups=int(reader.child(router, "topk_group", optional=True) or groups),
        scale=float(reader.child(router, "routed_scaling_factor", optional=True) or 1.0),
        factors=reader.floats(router, "per_expert_scale"),
    )
    # In float32, in which no two experts are equally good for a token.
    own = deepcopy(router).float()
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(16, weight.shape[1], generator=generator, device=weight.device)
    try:
        takes_bias = not inspect.signature(own.forward).parameters.keys().isdisjoint(_BIASES)
        expected = _weights_of(own(x, bias) if takes_bias else own(x), len(weight))
    except (RuntimeError, TypeError, ValueError) as error:
        raise NotKnown(f"its {type(router).__name__} takes other arguments: {error}") from error
    if norm is not None:
        x = norm(x)
    for is_sigmoid, adds_best_two, renormalizes in product((False, True), repeat=3):
        kind = replace(plain, is_sigmoid=is_sigmoid, adds_best_two=adds_best_two, renormalizes=renormalizes)
        for one in (kind, replace(kind, groups=1, top_groups=1)):
            if torch.allclose(one(x), expected, rtol=1e-3, atol=1e-5):
                return one
    raise NotKnown(f"its {type(router).__name__} chooses experts in another way")


def _weights_of(found: Any, experts: int) -> Tensor:
    """Return the weights float32 [tokens, experts] that a router has found, which has them of all experts, or of those
    that it has chosen. Raises ValueError."""
    if len(found) == 2 and found[0].shape[-1] == experts:
        return found[0].float()  # type: ignore[no-any-return]
    _, weights, chosen = found
    return torch.zeros(len(chosen), experts).scatter(-1, chosen, weights.float())
