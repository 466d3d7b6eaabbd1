"""Falcon-H1: each layer has attention and a Mamba 2 mixer, which read the same input, with factors everywhere."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import MLP, Layer, Mamba2, Matrix, NotKnown, Scales
from oaiserve.engine.decoder.facts import Facts, llama
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.families.mamba import names_of_mamba2
from oaiserve.engine.decoder.mixers import mamba2
from oaiserve.engine.decoder.reader import Reader
from oaiserve.engine.decoder.settings import Settings

_NAMES = {
    "final_norm": "model.final_layernorm",
    "mlp_norm": "pre_ff_layernorm",
    **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
    **names_of_mamba2("mamba"),
}


def _facts(settings: Settings) -> Facts:
    facts = llama(settings)
    read = settings["attention_in_multiplier"]
    if settings["attention_bias"] and read != 1:
        raise NotKnown("its queries, keys and values have biases, and what they are made of has a factor")
    return replace(
        facts,
        # Queries and keys are both products with the scaled input, so the factor counts twice.
        scaling=facts.scaling * read**2 * settings["key_multiplier"],
        embedding_scale=settings["embedding_multiplier"],
        logits_scale=settings["lm_head_multiplier"],
        with_mixer=frozenset(range(facts.num_layers)),
    )


def _mixer(reader: Reader, facts: Facts, settings: Settings) -> Mamba2:
    has_norm = settings["mamba_rms_norm"]
    norms_before_gates = settings["mamba_norm_before_gate"]
    if has_norm and norms_before_gates:
        raise NotKnown("its mixers have a norm before their gates")
    mixer = mamba2(reader, facts, settings, has_norm=has_norm)
    inner, gates, times = mixer.projections
    read = settings["ssm_in_multiplier"]
    if inner.bias is not None and read != 1:
        raise NotKnown("the projections of its mixers have biases, and what they read has a factor")
    of_gates, of_x, of_b, of_c, of_times = (read * factor for factor in settings["ssm_multipliers"])
    sizes = (mixer.heads * mixer.head_dim, *[mixer.groups * mixer.state_dim] * 2)
    # The convolution applies the factors of x, B and C, because it computes in float32.
    channels = torch.cat(
        [
            torch.full((size,), factor, dtype=torch.float32)
            for size, factor in zip(sizes, (of_x, of_b, of_c), strict=True)
        ]
    )
    convolution = replace(mixer.convolution, weight=mixer.convolution.weight * channels)
    projections = [inner, _scaled(gates, of_gates), _scaled(times, of_times)]
    return replace(mixer, projections=projections, convolution=convolution)


def _with_factors(layer: Layer, _reader: Reader, _facts: Facts, settings: Settings) -> Layer:
    of_gate, of_down = settings["mlp_multipliers"]
    scales = Scales(
        mixer=settings["ssm_out_multiplier"],
        attention=settings["attention_in_multiplier"] * settings["attention_out_multiplier"],
        mlp=of_down,
    )
    assert isinstance(layer.mlp, MLP)
    if layer.mlp.gate is None:
        raise NotKnown("its MLPs have no gates")
    return replace(layer, scales=scales, mlp=replace(layer.mlp, gate=_scaled(layer.mlp.gate, of_gate)))


def _scaled(matrix: Matrix, factor: float) -> Matrix:
    """Return the matrix times a factor. Adapters can't name it, because their products would lack the factor."""
    if factor == 1:
        return matrix
    if not isinstance(matrix.weight, Tensor):
        raise NotKnown("its matrices are in blocks, and their products have factors")
    if matrix.bias is None:
        bias = None
    else:
        bias = (matrix.bias.float() * factor).to(matrix.bias.dtype)
    return Matrix((matrix.weight.float() * factor).to(matrix.weight.dtype), bias)


FAMILIES = (Family(type="falcon_h1", facts=_facts, other_names=_NAMES, mixer=_mixer, adjust=_with_factors),)
