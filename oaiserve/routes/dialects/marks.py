"""Finds marks in a text whose end has not come yet."""

from __future__ import annotations

from collections.abc import Sequence


def find(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of the marks begins, and which it is.

    Without one, the mark is "", and the place is where the end of the text begins that may become a mark: the length of
    the text if there is none. No mark may be the beginning of another.
    """
    found, which, pending = -1, "", len(text)
    for mark in marks:
        at = text.find(mark)
        if at == -1:
            pending = min(pending, unfinished(text, mark))
        elif not which or at < found:
            found, which = at, mark
    return (found, which) if which else (pending, "")


def unfinished(text: str, mark: str) -> int:
    """Return where the longest end of the text begins that is a beginning of the mark."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at != -1:
        if mark.startswith(text[at:]):
            return at
        at = text.find(mark[0], at + 1)
    return len(text)
