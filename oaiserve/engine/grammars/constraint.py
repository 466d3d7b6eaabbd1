"""The constraint of one choice: the tokens allowed next by its grammar and the request's other parameters.

Engine thread only. It uses a grammar through its matcher. It must not depend on how a grammar is compiled, or on torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from oaiserve.engine.request import SamplingParams

if TYPE_CHECKING:
    from oaiserve.engine.grammars.grammar import Matcher
    from oaiserve.engine.grammars.thinking import Thinking


class Constraint:
    """The constraint of one choice, whose tokens are pushed one by one: on its reasoning, then by a grammar, or only
    one of them.

    The answer cannot end within the reasoning that precedes a grammar, or before `min_tokens`. In a grammar, nothing
    can follow an end-of-sequence id, so such ids aren't drawn if the request ignores them, unless the grammar allows
    nothing else.
    """

    __slots__ = ("_eos_token_ids", "_forces", "_ignores_eos", "_matcher", "_min_tokens", "_stop_ids", "_thinking")

    def __init__(
        self,
        matcher: Matcher | None,
        params: SamplingParams,
        *,
        thinking: Thinking | None = None,
        eos_token_ids: frozenset[int],
        stop_ids: frozenset[int],
    ) -> None:
        """`stop_ids` end the choice: the request's own, and the end-of-sequence ids unless the request ignores them."""
        self._matcher = matcher
        self._thinking = thinking  # None once the reasoning is over
        self._eos_token_ids = eos_token_ids
        self._stop_ids = stop_ids
        self._ignores_eos = params.ignore_eos
        self._min_tokens = params.min_tokens
        # If other parameters forbid a forced token, the draw reports that no token is left.
        wants_logprobs = params.logprobs is not None and params.shows_logprobs
        self._forces = not wants_logprobs and params.allowed_token_ids is None and not params.bad_words

    @property
    def is_free(self) -> bool:
        """Return whether any id may be drawn now, so that no mask is needed."""
        return self._matcher is None and not (self._thinking is not None and self._thinking.forced_ids)

    @property
    def is_in_grammar(self) -> bool:
        """Return whether the grammar constrains the text here. It does not constrain reasoning before it."""
        return self._matcher is not None and self._thinking is None

    @property
    def mask_ns(self) -> int:
        """Return the CPU time of the last mask, as an estimate for the next one."""
        if self._matcher is None:
            return 0
        return self._matcher.mask_ns

    @property
    def is_complete(self) -> bool:
        """Return whether the choice ends now, without an end-of-sequence token."""
        return self._matcher is not None and self._thinking is None and self._matcher.is_complete

    def ends_with(self, token_id: int) -> bool:
        """Return whether the choice ends if this token comes next, even if the request ignores ends of sequences."""
        return token_id in self._eos_token_ids and self._matcher is not None

    def push(self, token_id: int) -> None:
        """Append this token. Raises GrammarViolation if it may not come next."""
        if self._thinking is None:
            if self._matcher is not None:
                self._matcher.push(token_id)
            return
        begun = self._thinking.push(token_id)
        if self._thinking.is_over:
            self._thinking = None
            if self._matcher is not None:
                self._matcher.begin(begun)

    def forced_ids(self) -> list[int]:
        """Return the forced next ids, if the request needs none of the model's own probabilities."""
        if not self._forces:
            return []
        if self._thinking is not None:
            return list(self._thinking.forced_ids)
        if self._matcher is None:
            return []
        return self._matcher.forced_ids()

    def possible(self, draft: list[int]) -> list[int]:
        """Return how much of a draft is allowed, from its beginning. That is either all within the reasoning or all
        after it."""
        if self._thinking is not None:
            return draft[: self._thinking.num_possible(draft)]
        if self._matcher is None:
            return draft
        return draft[: self._matcher.num_possible(draft)]

    def fill_masks(self, rows: np.ndarray, num_generated: int, draft: Sequence[int]) -> None:
        """Fill a row for each draw: the first one after `num_generated` tokens, the others after each token of a
        possible draft."""
        if self._thinking is not None and (forced := self._thinking.forced_ids):
            rows[:] = 0
            for words, token_id in zip(rows, forced, strict=False):
                words[token_id // 32] = np.uint32(1 << token_id % 32)
            return
        if self._thinking is not None:
            assert self._matcher is not None
            for words, text in zip(rows, self._thinking.last_texts(draft), strict=True):
                self._matcher.fill_free(words)
                unfit = self._matcher.unfit_ends(text, self._thinking.closing)
                _remove(words, {*self._eos_token_ids, *self._stop_ids, *unfit})
            return
        self._fill_by_grammar(rows, num_generated, draft)

    def _fill_by_grammar(self, rows: np.ndarray, num_generated: int, draft: Sequence[int]) -> None:
        assert self._matcher is not None
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
            continue  # A tokenizer may have more ids than its model.
        rest[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)
    if rest.any():
        words[:] = rest
