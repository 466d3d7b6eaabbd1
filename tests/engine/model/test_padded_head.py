"""A padded output head gives the same logits, and its padding is not read where there is none."""

import pytest
import torch

from oaiserve.engine.model.padded_head import aligned, pad_head
from oaiserve.engine.start.prepare import prepare
from tests.models.decoders import FAMILIES, random_model

VOCAB = 97


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


def test_a_view_that_ends_with_its_storage_is_not_read_beyond_it() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.sampling import triton_sampling

    rows = torch.zeros(2 * aligned(VOCAB))
    whole = rows.view(2, -1)[:, :VOCAB]
    assert triton_sampling._sizes(whole)[3] == aligned(VOCAB)
    ends = rows[: aligned(VOCAB) + VOCAB].clone().as_strided((2, VOCAB), (aligned(VOCAB), 1))
    assert triton_sampling._sizes(ends)[3] == VOCAB
