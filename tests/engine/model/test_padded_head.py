"""A padded output head gives the same logits, and the same draws bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from oaiserve.engine.model.padded_head import aligned, pad_head
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.prepare import prepare
from tests.engine.model.sampling.sampling import next_rows
from tests.models.decoders import FAMILIES, random_model

VOCAB = 97

# Rows that are not finite are computed as the others are, and then marked.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered in subtract"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@torch.inference_mode()
def test_logits_are_the_same_and_their_rows_are_aligned(family: str) -> None:
    model = random_model(FAMILIES[family])
    ids = torch.arange(5)[None]
    expected = model(input_ids=ids).logits
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head.weight is embedding.weight
    pad_head(model)
    logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert head(torch.zeros(3, head.in_features)).stride() == (aligned(VOCAB), 1)
    assert (head.weight.data_ptr() == embedding.weight.data_ptr()) == is_tied
    assert prepare(model).vocab_size == VOCAB


def test_a_head_of_an_aligned_size_stays_as_it_is() -> None:
    model = random_model(type(FAMILIES["llama"])(**FAMILIES["llama"].to_dict() | {"vocab_size": 128}))
    weight = model.get_output_embeddings().weight
    address = weight.data_ptr()
    pad_head(model)
    assert (model.get_output_embeddings().weight.data_ptr(), weight.shape[0]) == (address, 128)


KINDS = [
    {"temperature": 0.0},
    {},
    {"min_p": 0.05},
    {"top_k": 7},
    {"top_k": VOCAB + 5},
    {"top_p": 0.8},
    {"temperature": 0.5, "top_k": 40, "top_p": 0.9},
]


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[:3], KINDS], ids=["greedy", "drawn", "cut"])
def test_padded_rows_draw_the_same_tokens_bit_for_bit(
    kinds: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.sampling import triton_sampling

    monkeypatch.setattr(triton_sampling, "CHUNK", 64)
    monkeypatch.setattr(triton_sampling, "TILE", 64)
    torch.manual_seed(0)
    sequences = [
        Sequence("r", 0, [1, 2], SamplingParams(**params), max_len=9, draw_key=key)
        for key, params in enumerate(kinds * 2)
    ]
    logits = torch.randn(len(sequences), VOCAB) * 4
    logits[-1, 3] = math.nan
    for dtype in (torch.float32, torch.bfloat16):
        plain = logits.to(dtype)
        padded = torch.full((len(plain), aligned(VOCAB)), math.inf, dtype=dtype)[:, :VOCAB]  # nothing draws the padding
        padded.copy_(plain)
        rows = next_rows(sequences)
        want_ids, want_finite = triton_sampling.sample_ids(plain, rows)
        token_ids, are_finite = triton_sampling.sample_ids(padded, rows)
        assert are_finite.tolist() == want_finite.tolist()
        assert token_ids[are_finite].tolist() == want_ids[want_finite].tolist()


def test_a_view_that_ends_with_its_storage_is_not_read_beyond_it() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.sampling import triton_sampling

    rows = torch.zeros(2 * aligned(VOCAB))
    whole = rows.view(2, -1)[:, :VOCAB]
    assert triton_sampling._sizes(whole)[3] == aligned(VOCAB)
    ends = rows[: aligned(VOCAB) + VOCAB].clone().as_strided((2, VOCAB), (aligned(VOCAB), 1))
    assert triton_sampling._sizes(ends)[3] == VOCAB
