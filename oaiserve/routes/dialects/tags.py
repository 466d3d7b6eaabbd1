"""Finds tags in an unfinished text."""

from __future__ import annotations

from collections.abc import Sequence


def find(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return the place of the first tag, and the tag.

    Without one, the tag is "", and the place is that of an unfinished tag at the end, or else the length of the text.
    No tag may be the beginning of another.
    """
    found, which, pending = -1, "", len(text)
    for tag in tags:
        at = text.find(tag)
        if at == -1:
            pending = min(pending, unfinished(text, tag))
        elif not which or at < found:
            found, which = at, tag
    return (found, which) if which else (pending, "")


def unfinished(text: str, tag: str) -> int:
    """Return the place of an unfinished tag at the end of the text, or else the length of the text."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at != -1:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)
