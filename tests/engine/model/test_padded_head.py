"""Rows of logits begin at aligned addresses, and their padding is not read where there is none."""

import pytest
import torch

from oaiserve.engine.model.padded_head import aligned

VOCAB = 97


def test_a_view_that_ends_with_its_storage_is_not_read_beyond_it() -> None:
    pytest.importorskip("triton", reason="Triton has no wheels for this system")
    from oaiserve.engine.model.sampling import triton_sampling

    rows = torch.zeros(2 * aligned(VOCAB))
    whole = rows.view(2, -1)[:, :VOCAB]
    assert triton_sampling._sizes(whole)[3] == aligned(VOCAB)
    ends = rows[: aligned(VOCAB) + VOCAB].clone().as_strided((2, VOCAB), (aligned(VOCAB), 1))
    assert triton_sampling._sizes(ends)[3] == VOCAB
