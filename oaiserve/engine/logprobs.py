"""Log-probabilities of tokens and of their alternatives, in the form in which they wait for a client. Stdlib only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

Entry = tuple[int, bytes, float]  # a token's id, its true bytes on its own, and its log-probability


@dataclass(slots=True)
class TopLogprob:
    """A token with its log-probability. `token` is its text on its own, `bytes` are its true UTF-8 bytes, which may be
    part of a character."""

    token_id: int
    token: str
    bytes: bytes
    logprob: float


@dataclass(slots=True)
class TokenLogprob(TopLogprob):
    """A sampled token, or one of the prompt, and the alternatives at its position, best first.

    The first token of a prompt has no log-probability: it is NaN, and there are no alternatives.
    """

    top: list[TopLogprob] = field(default_factory=list)


class TokenLogprobs(Sequence[TokenLogprob]):
    """The log-probabilities of consecutive tokens, as arrays: a `TokenLogprob` is made at each access.

    An answer may have hundreds of thousands of alternatives, and wait for a client that does not read. In arrays an
    alternative takes 20 bytes, because tokens share their texts; as an object it takes more than 200.
    """

    __slots__ = ("_bytes", "_ends", "_ids", "_logprobs")

    def __init__(self, rows: Iterable[TokenLogprob] = ()) -> None:
        self._ids = array("i")
        self._bytes: list[bytes] = []
        self._logprobs = array("d")
        self._ends = array("q")  # of each position: where the entries of the next one begin
        for row in rows:
            entries: list[TopLogprob] = [row, *row.top]
            self.add(
                [entry.token_id for entry in entries],
                [entry.bytes for entry in entries],
                [entry.logprob for entry in entries],
            )

    @classmethod
    def of_columns(cls, ids: array[int], texts: list[bytes], logprobs: array[float], ends: array[int]) -> TokenLogprobs:
        """Return the log-probabilities of which these are the columns."""
        self = cls()
        self._ids, self._bytes, self._logprobs, self._ends = ids, texts, logprobs, ends
        return self

    def columns(self) -> tuple[array[int], list[bytes], array[float], array[int]]:
        """Return the arrays themselves: ids, texts and log-probabilities of all entries, and where positions end."""
        return self._ids, self._bytes, self._logprobs, self._ends

    def add(self, ids: Iterable[int], texts: Iterable[bytes], logprobs: Iterable[float]) -> None:
        """Add a position: the token first, then its alternatives."""
        self._ids.extend(ids)
        self._bytes.extend(texts)
        self._logprobs.extend(logprobs)
        self._ends.append(len(self._ids))

    def extend(self, more: TokenLogprobs) -> None:
        first = len(self._ids)
        self._ids += more._ids
        self._bytes += more._bytes
        self._logprobs += more._logprobs
        self._ends.extend([first + end for end in more._ends])

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first so many positions."""
        if num_tokens < len(self._ends):
            end = self._start(num_tokens)
            del self._ids[end:], self._bytes[end:], self._logprobs[end:], self._ends[num_tokens:]

    @property
    def num_entries(self) -> int:
        """Return the number of tokens and alternatives."""
        return len(self._ids)

    def entries(self) -> Iterator[list[Entry]]:
        """Yield the entries of each position: the token's, then those of its alternatives. This makes no objects."""
        start = 0
        for end in self._ends:
            yield list(zip(self._ids[start:end], self._bytes[start:end], self._logprobs[start:end], strict=True))
            start = end

    def tokens(self) -> Iterator[Entry]:
        """Yield the entry of each token, without its alternatives."""
        start = 0
        for end in self._ends:
            yield self._ids[start], self._bytes[start], self._logprobs[start]
            start = end

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[TokenLogprob]:
        return map(self._row, range(len(self._ends)))

    @overload
    def __getitem__(self, position: int) -> TokenLogprob: ...

    @overload
    def __getitem__(self, position: slice) -> list[TokenLogprob]: ...

    def __getitem__(self, position: int | slice) -> TokenLogprob | list[TokenLogprob]:
        if isinstance(position, slice):
            return list(map(self._row, range(len(self._ends))[position]))
        return self._row(range(len(self._ends))[position])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenLogprobs):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenLogprobs({list(self)})"

    def _row(self, position: int) -> TokenLogprob:
        start, end = self._start(position), self._ends[position]
        rows = zip(self._ids[start:end], self._bytes[start:end], self._logprobs[start:end], strict=True)
        token, *top = (TopLogprob(token_id, text_of(data), data, logprob) for token_id, data, logprob in rows)
        return TokenLogprob(token.token_id, token.token, token.bytes, token.logprob, top)

    def _start(self, position: int) -> int:
        return self._ends[position - 1] if position else 0


def text_of(data: bytes) -> str:
    """Return the text of a token on its own: U+FFFD stands for a part of a character."""
    return data.decode(errors="replace")
