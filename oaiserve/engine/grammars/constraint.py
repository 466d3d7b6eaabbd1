"""The constraint of one choice: what its grammar lets come next, in accord with the request's other parameters.

Engine thread only. It knows a grammar's matcher by its methods, and must not know how a grammar is compiled, or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from oaiserve.engine.request import SamplingParams


class Matcher(Protocol):
    """A compiled grammar, after the tokens of one answer so far. `engine.grammar.Matcher` is one."""

    @property
    def is_free(self) -> bool:
        """Return whether no constraint applies yet."""

    @property
    def is_complete(self) -> bool:
        """Return whether nothing but the end can follow."""

    def fill_mask(self, words: np.ndarray) -> None:
        """Set bit i % 32 of `words[i // 32]`, uint32, to whether id i may come next, and all other bits to 0."""

    def forced_ids(self) -> list[int]:
        """Return ids that must come next, as far as that is known at little cost: each is the only one of its mask."""

    def num_possible(self, token_ids: list[int]) -> int:
        """Return how many of these may come next, one after the other, before it changes whether any id may come."""

    def fill_masks_behind(self, token_ids: Sequence[int], rows: np.ndarray) -> None:
        """Fill a row behind each of these tokens, as `fill_mask` will when they have come. All of them may come next.

        Rows behind the end, or from one on that would take too much, are left as they are.
        """

    def push(self, token_id: int) -> None:
        """Go on with this token. Raises GrammarViolation if it may not come next."""


class Constraint:
    """The constraint of one choice, whose tokens are pushed one by one. The end of its grammar wins.

    End-of-sequence ids that the request ignores cannot be followed by anything in a grammar, so they are not drawn. And
    before `min_tokens` nothing is drawn that ends the answer. But where the grammar has nothing else, the end comes.
    """

    __slots__ = ("_eos_token_ids", "_forces", "_ignores_eos", "_matcher", "_min_tokens", "_stop_ids")

    def __init__(
        self, matcher: Matcher, params: SamplingParams, *, eos_token_ids: frozenset[int], stop_ids: frozenset[int]
    ) -> None:
        """`stop_ids` end the choice: the end-of-sequence ids unless these are ignored, and the request's own."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._stop_ids = stop_ids
        self._ignores_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        # A forced token that other parameters forbid is left to the draw, which finds that no token is left.
        self._forces = params.logprobs is None and params.allowed_token_ids is None and not params.bad_words

    @property
    def is_free(self) -> bool:
        """Return whether any id may be drawn now."""
        return self._matcher.is_free

    @property
    def is_complete(self) -> bool:
        """Return whether the choice ends now, without an end-of-sequence token."""
        return self._matcher.is_complete

    def ends_with(self, token_id: int) -> bool:
        """Return whether the choice ends if this token comes next, also if the request ignores ends of sequences."""
        return token_id in self._eos_token_ids and not self._matcher.is_free

    def push(self, token_id: int) -> None:
        """Go on with this token. Raises GrammarViolation if it may not come next."""
        self._matcher.push(token_id)

    def forced_ids(self) -> list[int]:
        """Return the ids that come next whatever the model computes, if nobody asks what it would have computed."""
        return self._matcher.forced_ids() if self._forces else []

    def possible(self, draft: list[int]) -> list[int]:
        """Return the first tokens of a draft: as many as may come next, and are all under the grammar or all free."""
        return draft[: self._matcher.num_possible(draft)]

    def fill_masks(self, rows: np.ndarray, num_generated: int, draft: Sequence[int]) -> None:
        """Fill a row for each of the draws after `num_generated` tokens and behind each token of a possible draft.

        A row has the bits of the ids that may be drawn there, and no others.
        """
        self._matcher.fill_mask(rows[0])
        if draft:
            self._matcher.fill_masks_behind(draft, rows[1:])
        for number, words in enumerate(rows):
            self._leave_end_out(words, num_generated + number)

    def fill_mask(self, words: np.ndarray, num_generated: int) -> None:
        """Set the bits of the ids that may be drawn after `num_generated` tokens, and no others."""
        self.fill_masks(words[None], num_generated, ())

    def _leave_end_out(self, words: np.ndarray, num_generated: int) -> None:
        if self._ignores_eos:
            _remove(words, self._eos_token_ids)
        if num_generated < self._min_tokens:
            _remove(words, self._stop_ids)


def _remove(words: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of these ids, unless no other bit is set."""
    kept = words.copy()
    for token_id in token_ids:
        if token_id >= 32 * len(kept):
            continue  # a tokenizer may know more ids than its model
        kept[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if kept.any():
        words[:] = kept
