"""Describes mixtures of experts. Each family states how its routers choose and weight them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from oaiserve.engine.decoder.description import MLP, Expert, Experts, Matrix, NotKnown, Router
from oaiserve.engine.decoder.facts import Mixture
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings

_METHOD = "noaux_tc"  # the name in files for how DeepSeek V3 chooses experts


def mixture(reader: Reader, facts: Mixture, activation: str, shared: MLP | None) -> Experts:
    """Describe the experts of a layer and the shared MLP next to them. Raises NotKnown.

    `activation` is the activation function of each expert, unless the mixture has its own.
    """
    return Experts(
        router=_router(reader, facts),
        experts=_experts(reader, facts),
        activation=activation if facts.activation is None else facts.activation,
        shared=shared,
        shared_gate=reader.matrix("shared_gate") if facts.has_shared_gate else None,
        scales_inputs=facts.scales_inputs,
    )


def _experts(reader: Reader, facts: Mixture) -> list[Expert]:
    gates: Sequence[Matrix | None]
    if reader.has("experts.gate_up"):
        pairs = [_gate_and_up(both, is_in_turns=facts.is_in_turns) for both in reader.experts("gate_up")]
        gates = [gate for gate, _ in pairs]
        ups = [up for _, up in pairs]
    else:
        ups = reader.experts("up")
        gates = reader.experts("gate") if facts.has_gates else [None] * len(ups)
    downs = reader.experts("down")
    if not len(gates) == len(ups) == len(downs) > 0:
        raise NotKnown(f"its experts have {len(gates)} gates, {len(ups)} ups and {len(downs)} downs")
    return [Expert(gate, up, down) for gate, up, down in zip(gates, ups, downs, strict=True)]


def _gate_and_up(both: Matrix, *, is_in_turns: bool) -> tuple[Matrix, Matrix]:
    if is_in_turns:
        return both.picked(slice(0, None, 2)), both.picked(slice(1, None, 2))
    half = len(both.weight) // 2
    return both.picked(slice(half)), both.picked(slice(half, None))


def _router(reader: Reader, facts: Mixture) -> Router:
    weight = _numbers(reader, "router.weight", is_float32=facts.is_float32)
    if facts.num_experts not in (None, len(weight)):
        raise NotKnown(f"its config.json states {facts.num_experts} experts, but its files have {len(weight)}")
    choice_bias = None
    if facts.has_choice_bias:
        is_float32 = facts.is_float32 or facts.has_float32_bias
        choice_bias = _numbers(reader, "choice_bias", is_float32=is_float32).float().flatten()
    return Router(
        weight=weight,
        module=reader.module("router") if facts.is_router_adaptable else "",
        logits_bias=reader.numbers_or_none("router.bias"),
        bias=choice_bias,
        top_k=facts.top_k,
        groups=facts.groups,
        top_groups=facts.top_groups,
        is_sigmoid=facts.is_sigmoid,
        adds_best_two=facts.adds_best_two,
        renormalizes=facts.renormalizes,
        scale=facts.scale,
        factors=None,
    )


def _numbers(reader: Reader, name: str, *, is_float32: bool) -> Tensor:
    return reader.exact(name) if is_float32 else reader.in_dtype(name)


def after_dense_layers(settings: Settings) -> tuple[bool, ...]:
    return tuple(number >= settings["first_k_dense_replace"] for number in range(settings["num_hidden_layers"]))


def by_mlp_types(settings: Settings) -> tuple[bool, ...]:
    return tuple(kind == "sparse" for kind in settings["mlp_layer_types"])


def grouped_mixture(settings: Settings, layers: tuple[bool, ...] | None, num_experts: int) -> Mixture:
    """Return the facts of mixtures like DeepSeek V3's in the given layers, or in all layers. Raises NotKnown."""
    method = settings.get("topk_method")
    if method not in (None, _METHOD):
        raise NotKnown(f"it chooses experts by the method '{method}'")
    groups = settings["n_group"] or 1
    return Mixture(
        layers=layers,
        num_experts=num_experts,
        top_k=settings["num_experts_per_tok"],
        is_sigmoid=True,
        has_choice_bias=True,
        groups=groups,
        top_groups=settings["topk_group"] or groups,
        adds_best_two=groups > 1,
        renormalizes=settings["norm_topk_prob"],
        scale=float(settings["routed_scaling_factor"]),
        is_float32=True,
        has_shared=True,
    )
