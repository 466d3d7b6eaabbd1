"""Describes decoders: attention and an MLP, or experts, in each layer, with norms around them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import (
    MLP,
    Attention,
    AttentionParameters,
    Decoder,
    Experts,
    Layer,
    Matrix,
    Norm,
    NotKnown,
    RotaryTable,
    by_kind,
)
from oaiserve.engine.decoder.experts import mixture
from oaiserve.engine.decoder.facts import Facts
from oaiserve.engine.decoder.fit import fit
from oaiserve.engine.decoder.key_sizes import with_key_sizes
from oaiserve.engine.decoder.keys import refuse_other_tensors
from oaiserve.engine.decoder.latent import latent_attention
from oaiserve.engine.decoder.reader import Reader, Tensors
from oaiserve.engine.decoder.rotary import query_factors, rotary_table
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.spec import KVShape

if TYPE_CHECKING:
    from oaiserve.engine.decoder.families.family import Family


def describe(tensors: Tensors, settings: Settings, family: Family, length: int) -> Decoder:
    """Describe a decoder whose sequences have up to `length` tokens.

    Raises NotKnown if its files have something that the family doesn't.
    """
    facts = family.facts(settings)
    reader = Reader(tensors)
    embedding = reader.matrix("embedding")
    has_factors = tensors.has("frequency_factors")
    rotary = Rotary(settings, facts, length, reader.exact("frequency_factors").float() if has_factors else None)
    layers = [
        _layer(reader.at(f"layers.{number}"), family, facts, settings, rotary, number)
        for number in range(facts.num_layers)
    ]
    decoder = Decoder(
        embedding=embedding.weight,
        embedding_scale=_embedding_scale(facts, tensors.dtype),
        position_embedding=_position_embedding(reader, facts, length),
        layer_inputs=None if family.layer_inputs is None else family.layer_inputs(reader, facts, settings),
        layers=layers,
        residual_scale=facts.residual_scale,
        final_norm=reader.norm("final_norm", facts.norm),
        head=_head(reader, embedding, is_tied=facts.is_tied),
        logits_scale=facts.logits_scale,
        logits_softcap=facts.logits_softcap,
        vector_scale=facts.vector_scale,
        padding_id=_padding_id(settings),
        num_deep=settings.get("num_deep_layers", 0),
    )
    attending = next((number for number, layer in enumerate(layers) if layer.attention is not None), None)
    if attending is not None:
        refuse_other_tensors(settings, reader.at(f"layers.{attending}"))
    for number in range(facts.num_layers, facts.num_layers + facts.guessing_layers):
        tensors.leave_out(f"layers.{number}")
    if unread := tensors.unread():
        raise NotKnown(f"its files have a tensor '{unread[0][:100]}'")
    if not fit(decoder):
        raise NotKnown("the sizes of its matrices do not fit together")
    return replace(decoder, layers=[with_key_sizes(layer) for layer in layers])


class Rotary:
    """The rotary tables of a model, which its layers share."""

    def __init__(self, settings: Settings, facts: Facts, length: int, frequency_factors: Tensor | None = None) -> None:
        self._query_factors = query_factors(settings, length)
        self._settings = settings
        self._facts = facts
        self._length = length
        self._frequency_factors = frequency_factors
        self._tables: dict[tuple[str | None, float | None], RotaryTable | None] = {}

    def query_factors_of_layer(self, number: int) -> Tensor | None:
        facts = self._facts
        return None if facts.factors_are_for_unrotated and facts.rotates[number] else self._query_factors

    def of_layer(self, number: int) -> RotaryTable | None:
        facts = self._facts
        if not facts.rotates[number]:
            return None
        settings = self._settings
        kinds = settings.get("layer_types") or ()
        layer_type = kinds[number] if kinds and kinds[number] in settings["rope_parameters"] else None
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


def _padding_id(settings: Settings) -> int:
    token_id = settings["pad_token_id"]
    return token_id if token_id is not None and 0 <= token_id < settings["vocab_size"] else 0


def _embedding_scale(facts: Facts, dtype: torch.dtype) -> float:
    scale = facts.embedding_scale
    return float(torch.tensor(scale, dtype=dtype)) if facts.rounds_embedding_scale else scale


def _position_embedding(reader: Reader, facts: Facts, length: int) -> Tensor | None:
    if not reader.has("position_embedding"):
        return None
    rows = reader.in_dtype("position_embedding.weight")[facts.first_position :]
    if len(rows) < length:
        raise NotKnown(f"its files have embeddings of {len(rows)} positions, and its sequences {length}")
    return rows


def _head(reader: Reader, embedding: Matrix, *, is_tied: bool) -> Matrix:
    if not is_tied:
        return reader.matrix("head")
    reader.tensors.leave_out("head.weight")  # files may have it twice; the embedding counts
    return Matrix(embedding.weight, reader.bias("head"), reader.tensors.module("head"))


def _layer(reader: Reader, family: Family, facts: Facts, settings: Settings, rotary: Rotary, number: int) -> Layer:
    attention_norm = reader.norm_or_none("attention_norm", facts.norm)
    mlp_norm = reader.norm_or_none("mlp_norm", facts.norm)
    attends = number not in facts.without_attention
    mixer = family.mixer if number in facts.with_mixer else None
    layer = Layer(
        attention_norm=attention_norm,
        attention=family.attention(reader, facts, settings, rotary, number) if attends else None,
        mixer=None if mixer is None else mixer(reader.at("mixer"), facts, settings),
        attention_out_norm=reader.norm_or_none("attention_out_norm", facts.norm),
        mlp_norm=attention_norm if mlp_norm is None and facts.is_parallel else mlp_norm,
        mlp=None if number in facts.without_mlp else _mlp(reader, facts, number),
        mlp_out_norm=reader.norm_or_none("mlp_out_norm", facts.norm),
        is_parallel=facts.is_parallel,
    )
    return layer if family.adjust is None else family.adjust(layer, reader, facts, settings)


def attention(reader: Reader, facts: Facts, _settings: Settings, rotary: Rotary, number: int) -> Attention:
    """Describe attention with queries, keys and values of each token, or with latent vectors, in a layer."""
    if facts.latent is not None:
        return latent_attention(reader, facts, facts.latent, rotary.of_layer(number), facts.windows[number])
    qkv = _qkv(reader, facts)
    gate = None
    if facts.has_attention_gates:
        qkv[0], gate = _query_and_gate(qkv[0], facts)
    rows = sum(len(matrix.weight) for matrix in qkv)
    if rows != (facts.heads + 2 * facts.kv_heads) * facts.head_dim:
        raise NotKnown(f"its projections have {rows} rows for {facts.heads} heads of {facts.head_dim} numbers")
    sinks = reader.numbers_or_none("sinks")
    scaling = facts.scaling / (number + 1) if facts.scaling_falls else facts.scaling
    return Attention(
        qkv=qkv,
        cache_of=None,
        values_of_keys=False,
        gate=gate,
        out=reader.matrix("out"),
        heads=facts.heads,
        shape=KVShape(facts.kv_heads, facts.head_dim, facts.head_dim),
        query_norm=_head_norm(reader, facts, "q_norm", number),
        key_norm=_head_norm(reader, facts, "k_norm", number),
        value_norm=None,
        rotary=rotary.of_layer(number),
        rotary_offset=0,
        rotates_before_norms=facts.rotates_before_norms,
        query_factors=rotary.query_factors_of_layer(number),
        sinks=sinks,
        parameters=AttentionParameters(scaling, facts.windows[number], facts.softcap, has_sinks=sinks is not None),
    )


def _head_norm(reader: Reader, facts: Facts, role: str, number: int) -> Norm | None:
    """Return the norm of queries or of keys, if the layer has one."""
    if facts.has_weightless_qk_norms:
        norm = Norm(torch.ones(facts.head_dim), None, facts.norm.epsilon, subtracts_mean=False)
        return norm if facts.rotates[number] else None
    return reader.norm_or_none(role, facts.norm)


def _qkv(reader: Reader, facts: Facts) -> list[Matrix]:
    if not reader.has("qkv"):
        return [reader.matrix(role) for role in ("q", "k", "v")]
    together = reader.matrix("qkv")
    if not facts.qkv_parts:
        return [together]
    if isinstance(together.weight, Blocks):
        raise NotKnown("its projections are sorted by head")
    rows = by_kind(torch.arange(len(together.weight)), facts.kv_heads, facts.qkv_parts)
    return [replace(together.picked(rows), module=together.module, heads=facts.kv_heads, parts=facts.qkv_parts)]


def _query_and_gate(together: Matrix, facts: Facts) -> list[Matrix]:
    """Return the two matrices of which a file has one, in which the query of each head is followed by its gate."""
    if len(together.weight) != 2 * facts.heads * facts.head_dim:
        raise NotKnown(f"its queries and gates have {len(together.weight)} rows for {facts.heads} heads")
    rows = torch.arange(len(together.weight)).unflatten(0, (facts.heads, 2, -1))
    return [together.picked(rows[:, part].flatten()) for part in (0, 1)]


def _mlp(reader: Reader, facts: Facts, number: int) -> MLP | Experts:
    if facts.mixture is None or not facts.mixture.layers[number]:
        return dense_mlp(reader, facts.activation)
    shared = dense_mlp(reader.at("shared"), facts.activation) if facts.mixture.has_shared else None
    return mixture(reader, facts.mixture, facts.activation, shared)


def dense_mlp(reader: Reader, activation: str) -> MLP:
    """Describe an MLP, whose gates and ups may be one matrix."""
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
