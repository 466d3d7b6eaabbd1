"""Log-probabilities of tokens and their alternatives, in the form in which they are stored until a client gets them.
Stdlib only."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

Entry = tuple[int, bytes, float]  # a token's id, its true bytes on its own, and its log-probability
# Ids, bytes and log-probabilities of all entries; then, for each position, where its entries end, and its token's rank.
Columns: TypeAlias = "tuple[array[int], list[bytes], array[float], array[int], array[int]]"


class TokenLogprobs:
    """The log-probabilities of consecutive tokens, as arrays: for each position the token, then its alternatives.

    An answer may have hundreds of thousands of alternatives, and wait for an idle client. In arrays, an alternative
    takes 20 bytes, because tokens share their texts; as an object, it would take more than 200. The first token of a
    prompt has no log-probability: it is NaN, without alternatives.
    """

    __slots__ = ("columns",)

    def __init__(self, columns: Columns | None = None) -> None:
        self.columns: Columns = columns or (array("i"), [], array("d"), array("q"), array("i"))

    def add(self, ids: Iterable[int], texts: Iterable[bytes], logprobs: Iterable[float], *, rank: int = 0) -> None:
        """Add a position: the token first, then its alternatives, best first. The rank of the token is 0 if unknown."""
        all_ids, all_texts, all_logprobs, ends, ranks = self.columns
        all_ids.extend(ids)
        all_texts.extend(texts)
        all_logprobs.extend(logprobs)
        ends.append(len(all_ids))
        ranks.append(rank)

    def extend(self, more: TokenLogprobs) -> None:
        ids, texts, logprobs, ends, ranks = self.columns
        more_ids, more_texts, more_logprobs, more_ends, more_ranks = more.columns
        ends.extend([len(ids) + end for end in more_ends])
        ids.extend(more_ids)
        texts.extend(more_texts)
        logprobs.extend(more_logprobs)
        ranks.extend(more_ranks)

    def truncate(self, num_tokens: int) -> None:
        """Keep only the first positions, up to this number."""
        ids, texts, logprobs, ends, ranks = self.columns
        if num_tokens < len(ends):
            end = ends[num_tokens - 1] if num_tokens else 0
            del ids[end:], texts[end:], logprobs[end:], ends[num_tokens:], ranks[num_tokens:]

    @property
    def num_entries(self) -> int:
        return len(self.columns[0])

    def entries(self) -> Iterator[list[Entry]]:
        """Yield the entries of each position: the token's, then those of its alternatives."""
        ids, texts, logprobs, ends, _ = self.columns
        start = 0
        for end in ends:
            yield list(zip(ids[start:end], texts[start:end], logprobs[start:end], strict=True))
            start = end

    def tokens(self) -> Iterator[Entry]:
        """Yield the entry of each token, without its alternatives."""
        ids, texts, logprobs, ends, _ = self.columns
        start = 0
        for end in ends:
            yield ids[start], texts[start], logprobs[start]
            start = end

    @property
    def ranks(self) -> Sequence[int]:
        """The rank of each token in the whole vocabulary, from 1; 0: unknown."""
        return self.columns[4]

    def __len__(self) -> int:
        return len(self.columns[3])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenLogprobs) and self.columns == other.columns

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenLogprobs({self.columns})"


def text_of(data: bytes) -> str:
    """Return the text of a single token, with U+FFFD for a part of a character."""
    return data.decode(errors="replace")
