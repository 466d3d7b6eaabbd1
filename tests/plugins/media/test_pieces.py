"""What a tower computes in pieces is what it computes at once, and between pieces others run."""

import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from threading import enumerate as threads
from typing import Any

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


def test_an_error_of_torch_crashes_nothing_wherever_a_piece_is_resumed() -> None:
    """torch's C++ code walks up the stack at each error, so it needs one that is whole."""
    model = torch.nn.Linear(4, 4)
    cut_products(model)

    def run() -> None:
        for _ in range(40):
            model(torch.zeros(1, 4))  # a pause
            with pytest.raises(RuntimeError, match="cannot be multiplied"):
                torch.zeros(2, 3) @ torch.zeros(5, 4)

    def under(depth: int, call: Callable[..., object]) -> object:
        """Call a function with `depth` frames of C code above it on the stack, of different sizes."""
        if depth == 0:
            return call()
        calls: tuple[Callable[[Callable[..., Any]], object], ...] = (
            lambda inner: sorted([0], key=inner),
            lambda inner: list(map(inner, [0])),
            lambda inner: reduce(inner, [0, 0]),
        )
        return calls[depth % len(calls)](lambda *_: under(depth - 1, call) and 0)

    for start in range(30):
        pieces = in_pieces(run, 16, None)
        under(start, lambda pieces=pieces: next(pieces))
        for number in range(40):
            under(number * 7 % 30, lambda pieces=pieces: next(pieces))


def test_pieces_have_their_number_of_threads_and_other_code_has_its_own() -> None:
    model = torch.nn.Linear(4, 4)
    cut_products(model)
    before = torch.get_num_threads()
    numbers = []

    def run() -> None:
        for _ in range(3):
            model(torch.zeros(1, 4))
            numbers.append(torch.get_num_threads())

    for _ in in_pieces(run, 16, before + 1):
        assert torch.get_num_threads() == before
    assert numbers == [before + 1] * 3
    assert all(thread.name != "tower" for thread in threads())


def test_work_that_is_paused_does_not_keep_a_process_from_ending() -> None:
    code = (
        "from functools import partial\n"
        "import torch\n"
        "from oaiserve.plugins.media.model.pieces import cut_products, in_pieces\n"
        "model = torch.nn.Linear(4, 4)\n"
        "cut_products(model)\n"
        "pieces = in_pieces(partial(model, torch.zeros(4, 4)), 16, None)\n"
        "print(next(pieces))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("None\n", "")
