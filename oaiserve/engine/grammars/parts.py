"""A grammar for parts of an answer, such as calls of strict tools. Each part starts after a match in the free text.

Free text has no mask. Engine thread only.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import regex

from oaiserve.engine.grammars.constraint import Constraint
from oaiserve.engine.grammars.grammar import Matcher
from oaiserve.engine.grammars.thinking import Thinking
from oaiserve.engine.request import ANSWER_START, SamplingParams
from oaiserve.engine.text.detokenize import TokenTable

MOST_LEAD = 4096  # characters before a call's name; parsers ignore a call with more

_decoder = codecs.getincrementaldecoder("utf-8")


@lru_cache(64)
def _pattern(leads: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile("|".join(f"(?P<lead_{number}>{lead})" for number, lead in enumerate(leads)))


class Leads:
    """Searches the text of one choice for its leads, the regexes after whose matches a part begins. None of them ends
    with white space."""

    def __init__(self, leads: tuple[str, ...], table: TokenTable, hidden_ids: frozenset[int]) -> None:
        """`hidden_ids` are the ids of tokens whose texts aren't shown."""
        self._pattern = _pattern(leads)
        self._table = table
        self._hidden_ids = hidden_ids
        self.begin_at(ANSWER_START)

    def begin_at(self, text: str) -> None:
        self._text = text  # the text in which a lead may still match
        self._blanks: list[str] = []  # white space after `_text`
        self._is_searched = not text
        self._decoder = _decoder("replace")

    def copy(self) -> Leads:
        other = object.__new__(Leads)
        other._pattern = self._pattern
        other._table = self._table
        other._hidden_ids = self._hidden_ids
        other.begin_at(self._text)
        other._blanks = [*self._blanks]
        other._is_searched = self._is_searched
        other._decoder.setstate(self._decoder.getstate())
        return other

    def push(self, token_id: int) -> None:
        if token_id in self._hidden_ids:
            return
        text = self._decoder.decode(self._table.bytes_of(token_id))
        self._blanks.append(text)
        if text.strip() or len(self._blanks) > MOST_LEAD:
            self._text += "".join(self._blanks)
            self._blanks = []
            self._is_searched = False

    def find(self) -> bytes | None:
        """Return the text that the grammar reads first, if a lead matches: the letter of that lead, then the text after
        the match."""
        if self._is_searched:
            return None
        match = self._pattern.search(self._text)
        if match is None:
            self._is_searched = True
            unfinished = self._pattern.search(self._text, partial=True)
            while unfinished is not None and len(self._text) - unfinished.start() > MOST_LEAD:
                unfinished = self._pattern.search(self._text, unfinished.start() + 1, partial=True)
            if unfinished is None:
                self._text = ""
            else:
                self._text = self._text[unfinished.start() :]
            return None
        self._text = self._text[match.end() :]
        letter = chr(ord("A") + int(str(match.lastgroup).removeprefix("lead_")))
        return f"{letter}{self._text}".encode() + self._decoder.getstate()[0]


class PartsConstraint(Constraint):
    """The constraint of one choice in which only parts obey a grammar. Reasoning counts as free text."""

    __slots__ = ("_leads", "_new_matcher")

    def __init__(
        self,
        leads: Leads,
        new_matcher: Callable[[], Matcher],
        params: SamplingParams,
        *,
        thinking: Thinking | None,
        eos_token_ids: frozenset[int],
        stop_ids: frozenset[int],
    ) -> None:
        super().__init__(None, params, thinking=thinking, eos_token_ids=eos_token_ids, stop_ids=stop_ids)
        self._leads = leads
        self._new_matcher = new_matcher

    @property
    def is_in_grammar(self) -> bool:
        return self._matcher is not None

    @property
    def is_complete(self) -> bool:
        return False

    def ends_with(self, token_id: int) -> bool:
        return False  # Within a part, the grammar allows no end token.

    def push(self, token_id: int) -> None:
        if self._thinking is not None:
            if self._thinking.forced_ids:  # the forced end of reasoning interrupts a part
                self._matcher = None
            self._thinking.push(token_id)
            if self._thinking.is_over:
                self._thinking = None
        if self._matcher is not None:
            self._matcher.push(token_id)
            if not self._matcher.may_end:
                return
            self._matcher = None
            self._leads.begin_at("")
        self._leads.push(token_id)
        while (begun := self._leads.find()) is not None:
            matcher = self._new_matcher()
            if matcher.begins(begun) and not matcher.may_end:
                self._matcher = matcher
                return

    def possible(self, draft: list[int]) -> list[int]:
        """Return how much of a draft is allowed, from its beginning, up to where a part begins or ends."""
        if self._thinking is None:
            most = len(draft)
        else:
            most = self._thinking.num_possible(draft)
        if self._matcher is not None:
            return draft[: self._matcher.num_before_end(draft[:most])]
        leads = self._leads.copy()
        for number, token_id in enumerate(draft[:most]):
            leads.push(token_id)
            if leads.find() is not None:
                return draft[:number]
        return draft[:most]

    def fill_masks(self, rows: np.ndarray, num_generated: int, draft: Sequence[int]) -> None:
        if self._thinking is not None and self._thinking.forced_ids:
            super().fill_masks(rows, num_generated, draft)
        else:
            self._fill_by_grammar(rows, num_generated, draft)
