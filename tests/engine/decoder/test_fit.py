"""Sizes that do not fit together are noticed wherever they are in a description."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oaiserve.engine.decoder.description import MLP, Attention, Decoder, Matrix, Norm
from oaiserve.engine.decoder.fit import fit
from tests.engine.decoder.test_dense_families import attention_of, described, matrices_of


def _shorter(norm: Norm | None) -> Norm:
    """Return a norm whose bias lacks its last number."""
    assert norm is not None
    assert norm.bias is not None
    return replace(norm, bias=norm.bias[:-1])


def _in_attention(change: Callable[[Attention], Attention]) -> Callable[[Decoder], Decoder]:
    def changed(decoder: Decoder) -> Decoder:
        layers = list(decoder.layers)
        layers[1] = replace(layers[1], attention=change(attention_of(decoder)[1]))
        return replace(decoder, layers=layers)

    return changed


def _less_bias(matrix: Matrix) -> Matrix:
    assert matrix.bias is not None
    return replace(matrix, bias=matrix.bias[:-1])


def _mlp(decoder: Decoder) -> Decoder:
    layer = decoder.layers[1]
    assert isinstance(layer.mlp, MLP)
    return replace(decoder, layers=[replace(layer, mlp=replace(layer.mlp, up=_less_bias(layer.mlp.up)))])


CHANGES: dict[str, Callable[[Decoder], Decoder]] = {
    "last norm": lambda d: replace(d, final_norm=replace(d.final_norm, weight=d.final_norm.weight[:-1])),
    "bias of the last norm": lambda d: replace(d, final_norm=_shorter(d.final_norm)),
    "bias of a norm": lambda d: replace(d, layers=[replace(d.layers[0], mlp_norm=_shorter(d.layers[0].mlp_norm))]),
    "columns of the head": lambda d: replace(d, head=Matrix(d.embedding[:, :-1], None)),
    "bias of the head": lambda d: replace(d, head=Matrix(d.embedding, d.final_norm.weight)),
    "rows of the embedding": lambda d: replace(d, embedding=d.embedding[:-1]),
    "bias of an MLP": _mlp,
    "bias of queries, keys and values": _in_attention(lambda a: replace(a, qkv=[_less_bias(*matrices_of(a))])),
    "bias behind attention": _in_attention(lambda a: replace(a, out=_less_bias(a.out))),
    "embeddings of positions": lambda d: replace(d, position_embedding=d.embedding[:, :-1]),
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return described(Path(tmp_path_factory.mktemp("gpt2")), "gpt2")


def test_the_sizes_of_a_model_fit(decoder: Decoder) -> None:
    assert fit(decoder)


@pytest.mark.parametrize("name", CHANGES)
def test_another_size_does_not_fit(name: str, decoder: Decoder) -> None:
    assert not fit(CHANGES[name](decoder))
