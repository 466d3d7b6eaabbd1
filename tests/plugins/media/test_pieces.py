"""What a tower computes in pieces is what it computes at once, and between pieces others run."""

import pytest
import torch
from torch.nn import functional
from transformers import AttentionInterface

from oaiserve.plugins.media.model.pieces import ATTENTION, cut_products, in_pieces


def test_rows_of_products_in_parts_are_those_of_the_whole_and_pause_between() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    x = torch.randn(3, 7, 8)
    with torch.inference_mode():
        expected = model(x)
    cut_products(model)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)  # nobody works in pieces
    *pauses, actual = in_pieces(lambda: model(x), 8 * 16 * 5, None)
    assert pauses == [None] * (5 + 3)  # 21 rows in parts of 5, and of 10
    torch.testing.assert_close(actual, expected)
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0), (3, 2)])
def test_convolutions_in_parts_are_those_of_the_whole(stride: int, padding: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv1d(4, 6, 3, stride, padding)
    x = torch.randn(2, 4, 50)
    with torch.inference_mode():
        expected = model(x)
    cut_products(torch.nn.Sequential(model))
    *pauses, actual = in_pieces(lambda: model(x), 2 * 4 * 6 * 3 * 7, None)
    assert len(pauses) == -(-expected.shape[-1] // 7)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("masked", ["", "for all", "for each"])
def test_attention_in_parts_is_that_of_the_whole(masked: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 9, 8) for _ in range(3))
    mask = None
    if masked:
        mask = torch.rand(1 if masked == "for all" else 2, 1, 9, 9) > 0.3
        mask |= torch.eye(9, dtype=torch.bool)
    attend = AttentionInterface()[ATTENTION]
    *pauses, actual = in_pieces(
        lambda: attend(torch.nn.Identity(), query, key, value, mask, 0.5)[0], 2 * 3 * 9 * 8 * 4, None
    )
    assert len(pauses) == 2 * 3
    expected = functional.scaled_dot_product_attention(query, key, value, mask, scale=0.5).transpose(1, 2)
    torch.testing.assert_close(actual, expected)


def test_an_error_of_the_code_comes_out_of_the_piece_in_which_it_is_raised() -> None:
    model = torch.nn.Linear(4, 4)
    cut_products(model)

    def run() -> None:
        model(torch.zeros(2, 4))
        raise RuntimeError("of the model")

    pieces = in_pieces(run, 16, None)
    assert [next(pieces), next(pieces)] == [None, None]
    with pytest.raises(RuntimeError, match="of the model"):
        next(pieces)
    assert not torch.is_inference_mode_enabled()


def test_work_that_is_dropped_between_two_pieces_leaves_nothing_behind() -> None:
    model = torch.nn.Linear(4, 4)
    ended = []
    cut_products(model)

    def run() -> torch.Tensor:
        try:
            return model(torch.zeros(4, 4))
        finally:
            ended.append(True)

    pieces = in_pieces(run, 16, None)
    assert [next(pieces), next(pieces)] == [None, None]
    del pieces
    assert ended == [True]
    assert not torch.is_inference_mode_enabled()
    *_, result = in_pieces(run, 16, None)
    assert result.shape == (4, 4)
