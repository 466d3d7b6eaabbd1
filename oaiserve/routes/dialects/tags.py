"""Finds tags in a text whose end has not come yet."""

from __future__ import annotations

from collections.abc import Sequence


def find(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Return where the first of the tags begins, and which it is.

    Without one, the tag is "", and the place is where the end of the text begins that may become a tag: the length of
    the text if there is none. No tag may be the beginning of another.
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
    """Return where the longest end of the text begins that is a beginning of the tag."""
    at = text.find(tag[0], max(0, len(text) - len(tag) + 1))
    while at != -1:
        if tag.startswith(text[at:]):
            return at
        at = text.find(tag[0], at + 1)
    return len(text)
