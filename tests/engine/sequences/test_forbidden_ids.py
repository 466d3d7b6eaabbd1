"""Tests what parameters forbid together, against the logits that they are applied to."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from oaiserve.engine.model.sampling.logit_edits import edit_logits
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequences.forbidden_ids import leaves_no_token
from oaiserve.engine.sequences.masks import fill_masks
from oaiserve.engine.sequences.sequence import Sequence
from oaiserve.engine.sequences.step import Chunk
from tests.engine.grammars.plain import OneOf, constraint

VOCAB = 5  # with 0 as the end of sequences
IDS = st.integers(0, VOCAB - 1)


@given(
    allowed=st.none() | st.sets(IDS, min_size=1),
    bad_words=st.lists(st.lists(IDS, min_size=1, max_size=2), max_size=3),
    min_tokens=st.integers(0, 3),
    answers=st.none() | st.lists(st.lists(st.integers(1, VOCAB - 1), max_size=2), max_size=3),
    answer=st.lists(st.integers(1, VOCAB - 1), max_size=2),
)
def test_no_token_is_left_where_all_logits_are_minus_infinity(
    allowed: set[int] | None,
    bad_words: list[list[int]],
    min_tokens: int,
    answers: list[list[int]] | None,
    answer: list[int],
) -> None:
    params = SamplingParams(
        allowed_token_ids=None if allowed is None else tuple(allowed), min_tokens=min_tokens, max_tokens=9
    )
    sequence = Sequence("r", 0, [1], params, max_len=40, bad_words=bad_words, stop_ids=frozenset([0]))
    sequence.token_ids += answer
    if answers is not None:
        sequence.constraint = constraint(OneOf(*answers), min_tokens=min_tokens)
    chunk = Chunk(sequence, len(answer), 1)
    masks, _ = fill_masks([chunk], VOCAB)
    logits = edit_logits(torch.zeros(1, VOCAB), [chunk], masks)
    assert leaves_no_token(chunk, VOCAB) == bool((logits == -torch.inf).all())
