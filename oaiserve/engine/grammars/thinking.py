"""The reasoning of one choice, token by token: where it ends, and the ids that end it when its budget is spent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oaiserve.engine.request import Reasoning
from oaiserve.engine.text.detokenize import TokenTable


class Thinking:
    """The reasoning of one choice. White space after its end belongs to it, because models write it with the closing
    text."""

    def __init__(self, reasoning: Reasoning, table: TokenTable, closing_ids: Sequence[int]) -> None:
        """`closing_ids` are the token ids of the closing text, which is forced once the budget is spent."""
        self.is_over = False
        self._opening = reasoning.opening.encode()
        self.closing = reasoning.closing.encode()
        self._is_open = not reasoning.opening
        self._table = table
        self._budget = reasoning.budget
        self._closing_ids = closing_ids
        self._num_tokens = 0
        self._num_forced = 0
        self._text = b""  # text that may be part of the opening or closing tag
        self._blanks = bytearray()  # white space before that text, and before the opening tag

    @property
    def forced_ids(self) -> Sequence[int]:
        """Return the ids that have to come next: the rest of the closing text, if the budget is spent."""
        is_spent = self._is_open and self._budget is not None and self._num_tokens >= self._budget
        if is_spent:
            return self._closing_ids[self._num_forced :]
        return ()

    def num_possible(self, token_ids: Sequence[int]) -> int:
        """Return how many of these ids may come next, in order, such that the draw after them is as free as this
        one."""
        if forced := self.forced_ids:
            same = [one == other for one, other in zip(token_ids, forced[:-1], strict=False)]
            if False in same:
                return same.index(False)
            return len(same)
        number = 0
        text = self._text
        if self._budget is None:
            left = len(token_ids)
        else:
            left = max(0, self._budget - self._num_tokens - 1)
        while number < min(left, len(token_ids)) and self.closing not in text:
            text += self._table.bytes_of(token_ids[number])
            number += 1
        if self.closing in text:
            return number - 1
        return number

    def last_texts(self, draft: Sequence[int]) -> Iterator[bytes]:
        """Yield the last text, which may contain the beginning of the closing text, now and after each token of a
        possible draft."""
        text = self._text
        yield text
        for token_id in draft:
            text += self._table.bytes_of(token_id)
            yield text

    def push(self, token_id: int) -> bytes:
        """Advance by this token. Return the text after the end of the reasoning once the end is reached."""
        if forced := self.forced_ids:
            if token_id == forced[0]:
                self._num_forced = self._num_forced + 1
            else:
                self._num_forced = 0
        self._text += self._table.bytes_of(token_id)
        if not self._is_open:
            begun = self._text.lstrip()
            self._blanks += self._text[: len(self._text) - len(begun)]
            self._text = begun
            if not begun.startswith(self._opening):
                self.is_over = not self._opening.startswith(begun)
                if self.is_over:
                    return bytes(self._blanks) + begun
                return b""
            self._is_open = True
            self._text = begun[len(self._opening) :]
        else:
            self._num_tokens += 1
        _, closing, behind = self._text.partition(self.closing)
        self._text = self._text[max(0, len(self._text) - len(self.closing) + 1) :]
        self.is_over = bool(closing) or (self._num_forced > 0 and not self.forced_ids)
        return behind.lstrip()
