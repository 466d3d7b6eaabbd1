"""A grammar lets tokens come next in accord with the other parameters of its request, and fills the masks of a step."""

import numpy as np
import pytest

from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.masks import fill_masks
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk
from tests.engine.grammars.plain import OneOf, allowed_ids, constraint

VOCAB = 70  # so that the last word of a mask is not full


def pushed(matcher: OneOf, *ids: int) -> OneOf:
    for token_id in ids:
        matcher.push(token_id)
    return matcher


# -- one choice

AB = [[5, 33], [5, 33, 69]]


@pytest.mark.parametrize(
    ("ids", "params", "num_generated", "expected"),
    [
        ((), {}, 0, [5]),
        ((5, 33), {}, 2, [0, 69]),
        ((5, 33), {"ignore_eos": True}, 2, [69]),
        ((5, 33), {"min_tokens": 3}, 2, [69]),
        ((5, 33), {"min_tokens": 2}, 2, [0, 69]),
        ((5,), {"min_tokens": 9, "stop_token_ids": (33,)}, 1, [33]),
        ((5, 33), {"min_tokens": 9, "stop_token_ids": (69,)}, 2, [0, 69]),
        ((5, 33, 69), {"min_tokens": 9}, 3, [0]),
        ((5, 33, 69), {"ignore_eos": True}, 3, [0]),
    ],
)
def test_ends_that_are_not_wanted_are_not_in_a_mask_unless_nothing_else_is(
    ids: tuple[int, ...], params: dict[str, object], num_generated: int, expected: list[int]
) -> None:
    words = np.full(3, 0xFFFFFFFF, np.uint32)
    constraint(pushed(OneOf(*AB), *ids), **params).fill_masks(words[None], num_generated, ())
    assert allowed_ids(words) == expected


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [5, 33]),
        ({"min_tokens": 9, "stop_token_ids": (5,)}, [5, 33]),
        ({"logit_bias": {5: -100.0}}, [5, 33]),
        ({"logprobs": 0}, []),
        ({"allowed_token_ids": (5, 33)}, []),
        ({"bad_words": ("x",)}, []),
    ],
)
def test_ids_are_forced_where_nothing_else_is_asked_or_may_forbid_them(
    params: dict[str, object], expected: list[int]
) -> None:
    assert constraint(OneOf(*AB), **params).forced_ids() == expected


def test_an_end_of_sequence_ends_an_answer_under_a_grammar_also_if_it_is_ignored() -> None:
    own = constraint(OneOf([5]), ignore_eos=True)
    assert (own.is_free, own.ends_with(0), own.ends_with(5), own.forced_ids()) == (False, True, False, [5])
    own.push(5)
    assert own.is_complete


# -- the masks of a step


def chunk(matcher: OneOf | None, **params: object) -> Chunk:
    """Return a chunk that ends with the third token of a sequence. Its prompt has two."""
    own = None if matcher is None else constraint(matcher, **params)
    one = Sequence("r", 0, [1, 2], SamplingParams(), max_len=9, constraint=own)
    one.token_ids = [1, 2, 3]
    return Chunk(one, 2, 1)


def test_each_chunk_that_is_constrained_now_has_a_row() -> None:
    chunks = [
        chunk(OneOf([5], [69])),
        chunk(None),
        chunk(OneOf([], [3]), min_tokens=2),
        chunk(OneOf([], [3]), min_tokens=1),
    ]
    masks, failed = fill_masks(chunks, VOCAB)
    assert masks.words.shape == (3, 3)
    rows = {
        place: allowed_ids(masks.words[masks.rows[c.sequence]])
        for place, c in enumerate(chunks)
        if c.sequence in masks.rows
    }
    assert (rows, failed) == ({0: [5, 69], 2: [3], 3: [0, 3]}, [])


def test_without_a_constrained_chunk_there_are_no_masks() -> None:
    assert fill_masks([chunk(None), chunk(None)], VOCAB) == (None, [])


class Broken(OneOf):
    def fill_mask(self, words: np.ndarray) -> None:
        raise ValueError("a bug")


def test_a_grammar_that_fails_leaves_the_masks_of_the_others_as_they_are() -> None:
    broken = chunk(Broken([5]))
    sound = chunk(OneOf([6]))
    masks, failed = fill_masks([broken, sound], VOCAB)
    assert [str(error) for one, error in failed if one is broken.sequence] == ["a bug"]
    assert len(failed) == 1
    assert allowed_ids(masks.words[masks.rows[sound.sequence]]) == [6]
