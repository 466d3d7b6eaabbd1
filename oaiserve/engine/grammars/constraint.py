"""The constraint of one choice: the tokens allowed next by its grammar and the request's other parameters.

Engine thread only. It knows a grammar by its matcher, and must not know how a grammar is compiled, or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oaiserve.engine.request import SamplingParams

if TYPE_CHECKING:
    from oaiserve.engine.grammars.grammar import Matcher


class Constraint:
    """The constraint of one choice, whose tokens are pushed one by one. The end of its grammar wins.

    In a grammar, nothing can follow end-of-sequence ids, so ignored ones are not drawn. Before `min_tokens`, no end of
    the answer is drawn. But where the grammar has nothing else, the end comes.
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
    def mask_ns(self) -> int:
        """Return the CPU time of the last mask, which the next one will about take."""
        return self._matcher.mask_ns

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
        """Return the ids forced by the grammar, if the request needs none of the model's own probabilities."""
        return self._matcher.forced_ids() if self._forces else []

    def possible(self, draft: list[int]) -> list[int]:
        """Return the first allowed tokens of a draft, either all under the grammar or all free."""
        return draft[: self._matcher.num_possible(draft)]

    def fill_masks(self, rows: np.ndarray, num_generated: int, draft: Sequence[int]) -> None:
        """Fill a row for each draw: after `num_generated` tokens, and behind each token of a possible draft."""
        self._matcher.fill_mask(rows[0])
        if draft:
            self._matcher.fill_masks_behind(draft, rows[1:])
        for number, words in enumerate(rows, num_generated):
            if self._ignores_eos:
                _remove(words, self._eos_token_ids)
            if number < self._min_tokens:
                _remove(words, self._stop_ids)


def _remove(words: np.ndarray, token_ids: Iterable[int]) -> None:
    """Clear the bits of these ids, unless no other bit is set."""
    rest = words.copy()
    for token_id in token_ids:
        if token_id >= 32 * len(rest):
            continue  # a tokenizer may know more ids than its model
        rest[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if rest.any():
        words[:] = rest
