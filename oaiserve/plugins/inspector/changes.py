"""`changes_of`: the differences between two prompts.

Lines that are unique in both prompts are matched. Between two matched lines, only equal tokens at both ends are
matched. So the running time is nearly linear in the length of the prompts, however often their lines repeat.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, islice, takewhile
from typing import Any, NamedTuple, TypeAlias

Line: TypeAlias = tuple[int, ...]
Match: TypeAlias = tuple[int, int]  # indices of a line in the earlier prompt and in this one
Chain: TypeAlias = "tuple[Match, Chain | None]"  # linked list: a match, and the matches before it


class Change(NamedTuple):
    """A part of a prompt that differs from an earlier prompt. All numbers count tokens."""

    start: int
    added: int  # length of the part in this prompt
    removed_start: int
    removed: int  # length of the part in the earlier prompt


def changes_of(before: Sequence[int], now: Sequence[int], ends_line: Callable[[int], bool]) -> list[Change]:
    """Return the differences between the tokens of two prompts, in order. `ends_line` returns whether a token
    contains the end of a line."""
    old = [*_lines(before, ends_line), ()]  # The empty line at the end always matches, as the last match.
    new = [*_lines(now, ends_line), ()]
    old_starts = [0, *accumulate(map(len, old))]
    new_starts = [0, *accumulate(map(len, new))]
    changes = []
    removed_start = start = 0
    for old_place, new_place in _matches(old, new):
        removed = before[removed_start : old_starts[old_place]]
        added = now[start : new_starts[new_place]]
        same, same_end = num_same_at_ends(removed, added)
        num_removed = len(removed) - same - same_end
        num_added = len(added) - same - same_end
        if num_removed or num_added:
            changes.append(Change(start + same, num_added, removed_start + same, num_removed))
        removed_start = old_starts[old_place + 1]
        start = new_starts[new_place + 1]
    return changes


def num_same_at_ends(first: Sequence[Any], second: Sequence[Any]) -> tuple[int, int]:
    """Return the lengths of the common prefix of two lists, and of the common suffix of the rest."""
    start = _num_same(zip(first, second, strict=False))
    num_others = min(len(first), len(second)) - start
    return start, _num_same(islice(zip(reversed(first), reversed(second), strict=False), num_others))


def _num_same(pairs: Iterable[tuple[Any, Any]]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _lines(token_ids: Sequence[int], ends_line: Callable[[int], bool]) -> Iterator[Line]:
    ends = {token_id: ends_line(token_id) for token_id in {*token_ids}}
    start = 0
    for end, token_id in enumerate(token_ids, start=1):
        if ends[token_id] or end == len(token_ids):
            yield tuple(token_ids[start:end])
            start = end


def _matches(old: Sequence[Line], new: Sequence[Line]) -> list[Match]:
    """Return the longest common subsequence of the lines that are unique in both prompts."""
    old_counts = Counter(old)
    new_counts = Counter(new)
    old_places = {line: place for place, line in enumerate(old) if old_counts[line] == 1}
    longest: list[Chain] = []  # for each length, the chain that ends earliest in the earlier prompt
    last_places: list[int] = []  # where these chains end in the earlier prompt
    for new_place, line in enumerate(new):
        if new_counts[line] == 1 and (old_place := old_places.get(line)) is not None:
            length = bisect_left(last_places, old_place)
            last_places[length : length + 1] = [old_place]
            longest[length : length + 1] = [((old_place, new_place), longest[length - 1] if length else None)]
    chain: Chain | None = longest[-1]
    matches = []
    while chain is not None:
        match, chain = chain
        matches.append(match)
    return matches[::-1]
