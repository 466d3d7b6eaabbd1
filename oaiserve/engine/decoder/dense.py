"""Describes the parts of layers that most families have: attention, and an MLP or experts."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oaiserve.engine.decoder.description import (
    MLP,
    Attention,
    AttentionParameters,
    Experts,
    LatentProjection,
    Matrix,
    Norm,
    NotKnown,
    RotaryTable,
    by_kind,
)
from oaiserve.engine.decoder.experts import mixture
from oaiserve.engine.decoder.facts import Facts, Latent
from oaiserve.engine.decoder.reader import NormKind, Reader
from oaiserve.engine.decoder.rotary import query_factors, rotary_table
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.spec import KVShape

_LATENT_NORM = NormKind(epsilon=1e-6)  # regardless of the settings, which are for other norms


class Rotary:
    def __init__(self, settings: Settings, facts: Facts, length: int, frequency_factors: Tensor | None = None) -> None:
        self._query_factors = query_factors(settings, length)
        self._settings = settings
        self._facts = facts
        self._length = length
        self._frequency_factors = frequency_factors
        self._tables: dict[tuple[str | None, float | None], RotaryTable | None] = {}

    def query_factors_of_layer(self, number: int) -> Tensor | None:
        facts = self._facts
        if facts.factors_are_for_unrotated and facts.rotates[number]:
            return None
        return self._query_factors

    def of_layer(self, number: int) -> RotaryTable | None:
        facts = self._facts
        if not facts.rotates[number]:
            return None
        settings = self._settings
        layer_type = self._layer_type(number)
        theta = None if facts.thetas is None else facts.thetas[number]
        if (layer_type, theta) not in self._tables:
            if self._frequency_factors is not None and (layer_type, theta) != (None, None):
                raise NotKnown("its files have factors of frequencies, which its layers have several of")
            self._tables[layer_type, theta] = rotary_table(
                settings,
                self._length,
                layer_type=layer_type,
                theta=theta,
                is_interleaved=facts.is_interleaved,
                frequency_factors=self._frequency_factors,
            )
        return self._tables[layer_type, theta]

    def _layer_type(self, number: int) -> str | None:
        """Return the type of a layer if the rotary tables depend on it. Otherwise the types are not read."""
        rope = self._settings.get("rope_parameters") or {}
        if not any(isinstance(of_layers, dict) for of_layers in rope.values()):
            return None
        kinds = self._settings.get("layer_types")
        return kinds[number] if kinds and kinds[number] in rope else None


def attention(reader: Reader, facts: Facts, _settings: Settings, rotary: Rotary, number: int) -> Attention:
    if facts.latent is not None:
        return _latent(reader, facts, facts.latent, rotary.of_layer(number), facts.windows[number])
    qkv = _qkv(reader, facts)
    gate = None
    if facts.has_attention_gates:
        qkv[0], gate = _query_and_gate(qkv[0], facts)
    rows = sum(len(matrix.weight) for matrix in qkv)
    if rows != (facts.heads + 2 * facts.kv_heads) * facts.head_dim:
        raise NotKnown(f"its projections have {rows} rows for {facts.heads} heads of {facts.head_dim} numbers")
    if facts.scaling_falls:
        scaling = facts.scaling / (number + 1)
    else:
        scaling = facts.scaling
    return Attention(
        qkv=qkv,
        gate=gate,
        out=reader.matrix("out"),
        heads=facts.heads,
        shape=KVShape(facts.kv_heads, facts.head_dim, facts.head_dim),
        query_norm=_head_norm(reader, facts, "q_norm", number),
        key_norm=_head_norm(reader, facts, "k_norm", number),
        rotary=rotary.of_layer(number),
        rotates_before_norms=facts.rotates_before_norms,
        query_factors=rotary.query_factors_of_layer(number),
        sinks=reader.numbers_or_none("sinks"),
        parameters=AttentionParameters(
            scaling,
            facts.windows[number],
            facts.softcap,
            chunk=None if facts.chunks is None else facts.chunks[number],
        ),
    )


def _latent(reader: Reader, facts: Facts, sizes: Latent, rotary: RotaryTable | None, window: int | None) -> Attention:
    """Describe attention with a latent vector instead of keys and values. Raises NotKnown."""
    has_down = sizes.query_rank is not None
    qkv = LatentProjection(
        query_down=reader.matrix("q_down") if has_down else None,
        query_norm=reader.norm("q_down_norm", _LATENT_NORM) if has_down else None,
        query=reader.matrix("q_up" if has_down else "q"),
        down=reader.matrix("kv_down"),
        norm=reader.norm("kv_down_norm", _LATENT_NORM),
        up=reader.matrix("kv_up"),
    )
    if qkv.up.bias is not None:
        raise NotKnown("its keys and values are made from latent vectors with a bias")
    return Attention(
        qkv=qkv,
        out=reader.matrix("out"),
        heads=facts.heads,
        shape=KVShape(
            facts.heads, sizes.own_dim + sizes.shared_dim, sizes.value_dim, latent_dim=sizes.rank + sizes.shared_dim
        ),
        rotary=rotary,
        rotary_offset=sizes.own_dim,
        parameters=AttentionParameters(facts.scaling, window, facts.softcap),
    )


def _head_norm(reader: Reader, facts: Facts, role: str, number: int) -> Norm | None:
    """Return the norm of queries or of keys, if the layer has one."""
    if facts.has_weightless_qk_norms:
        norm = Norm(torch.ones(facts.head_dim, dtype=torch.float32), None, facts.norm.epsilon, subtracts_mean=False)
        if facts.rotates[number]:
            return norm
        return None
    return reader.norm_or_none(role, facts.norm)


def _qkv(reader: Reader, facts: Facts) -> list[Matrix]:
    if not reader.has("qkv"):
        return [reader.matrix(role) for role in ("q", "k", "v")]
    together = reader.matrix("qkv")
    if not facts.qkv_parts:
        return [together]
    rows = by_kind(torch.arange(len(together.weight)), facts.kv_heads, facts.qkv_parts)
    return [replace(together.picked(rows), module=together.module, heads=facts.kv_heads, parts=facts.qkv_parts)]


def _query_and_gate(together: Matrix, facts: Facts) -> list[Matrix]:
    """Return the matrices of queries and gates. Files join them: each head's gate follows its query."""
    if len(together.weight) != 2 * facts.heads * facts.head_dim:
        raise NotKnown(f"its queries and gates have {len(together.weight)} rows for {facts.heads} heads")
    rows = torch.arange(len(together.weight)).unflatten(0, (facts.heads, 2, -1))
    return [together.picked(rows[:, part].flatten()) for part in (0, 1)]


def mlp(reader: Reader, facts: Facts, number: int) -> MLP | Experts:
    if facts.mixture is None or not facts.mixture.is_in(number):
        dense = dense_mlp(reader, facts.activation)
        if facts.gate_sparsity is None:
            return dense
        return replace(dense, cutoff=_cutoff(facts.gate_sparsity[number], reader.tensors.dtype))
    if facts.mixture.has_shared:
        shared = dense_mlp(reader.at("shared"), facts.activation)
    else:
        shared = None
    return mixture(reader, facts.mixture, facts.activation, shared)


def _cutoff(sparsity: float, dtype: torch.dtype) -> float | None:
    """Return the quantile of the normal distribution at this sparsity, in the dtype of the model; None at 0."""
    if sparsity <= 0:
        return None
    return float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(sparsity)).to(dtype))


def dense_mlp(reader: Reader, activation: str) -> MLP:
    """Describe an MLP, whose gate and up projections may be one matrix."""
    down = reader.matrix("down")
    if not reader.has("gate_up"):
        return MLP(reader.matrix_or_none("gate"), reader.matrix("up"), down, activation)
    both = reader.matrix("gate_up")
    gate, up = both.weight.chunk(2)
    biases: tuple[Tensor | None, ...] = (None, None) if both.bias is None else both.bias.chunk(2)
    return MLP(
        replace(both, weight=gate, bias=biases[0]),
        replace(both, weight=up, bias=biases[1], first_row=len(gate)),
        down,
        activation,
    )
