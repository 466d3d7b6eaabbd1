"""Describes a decoder from the tensors and settings of its files, as its family defines."""

from __future__ import annotations

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.complete import refuse_incomplete
from oaiserve.engine.decoder.dense import Rotary, mlp
from oaiserve.engine.decoder.description import (
    Decoder,
    Layer,
    Matrix,
    NotKnown,
)
from oaiserve.engine.decoder.facts import Facts
from oaiserve.engine.decoder.families.family import Family
from oaiserve.engine.decoder.fit import fit
from oaiserve.engine.decoder.keys import refuse_other_tensors
from oaiserve.engine.decoder.reader import Reader, Tensors
from oaiserve.engine.decoder.settings import Settings


def describe(tensors: Tensors, settings: Settings, family: Family, length: int) -> Decoder:
    """Describe a decoder whose sequences have up to `length` tokens.

    Raises NotKnown if its files contain something that the family doesn't support.
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
        hidden_states=None if family.hidden_states is None else family.hidden_states(reader, settings),
    )
    readers = [reader.at(f"layers.{number}") for number in range(facts.num_layers)]
    attending = [one for number, one in enumerate(readers) if number not in facts.without_attention]
    refuse_other_tensors(settings, readers, attending)
    for number in range(facts.num_layers, facts.num_layers + facts.mtp_layers):
        tensors.leave_out(f"layers.{number}")
    if unread := tensors.unread():
        raise NotKnown(f"its files have a tensor '{unread[0][:100]}'")
    if (rows := len(decoder.head.weight)) != settings["vocab_size"]:
        raise NotKnown(f"its head has {rows} rows, and its vocabulary {settings['vocab_size']} tokens")
    refuse_incomplete(layers)
    if not fit(decoder):
        raise NotKnown("the sizes of its matrices do not fit together")
    return decoder


def _padding_id(settings: Settings) -> int:
    token_id = settings["pad_token_id"]
    return token_id if token_id is not None and 0 <= token_id < settings["vocab_size"] else 0


def _embedding_scale(facts: Facts, dtype: torch.dtype) -> float:
    scale = facts.embedding_scale
    if facts.rounds_embedding_scale:
        return float(torch.tensor(scale, dtype=dtype))
    return scale


def _position_embedding(reader: Reader, facts: Facts, length: int) -> Tensor | None:
    if not reader.has("position_embedding"):
        return None
    rows = reader.in_dtype("position_embedding.weight")[facts.first_position :]
    if len(rows) < length:
        raise NotKnown(f"its files have embeddings of {len(rows)} positions, and its sequences {length}")
    return rows


def _head(reader: Reader, embedding: Matrix, *, is_tied: bool) -> Matrix:
    if not is_tied or reader.has("head"):
        head = reader.matrix("head")
        if not is_tied or _differ(head.weight, embedding.weight):  # transformers doesn't tie weights that differ
            return head
    reader.tensors.leave_out("head.weight")  # Files may store the tied weights twice.
    return Matrix(embedding.weight, reader.bias("head"), reader.tensors.module("head"))


def _differ(head: Tensor | Blocks, embedding: Tensor | Blocks) -> bool:
    return not (isinstance(head, Tensor) and isinstance(embedding, Tensor) and torch.equal(head, embedding))


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
        mlp=None if number in facts.without_mlp else mlp(reader, facts, number),
        mlp_out_norm=reader.norm_or_none("mlp_out_norm", facts.norm),
        is_parallel=facts.is_parallel,
    )
    if family.adjust is None:
        return layer
    return family.adjust(layer, reader, facts, settings)
