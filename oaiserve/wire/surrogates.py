"""Halves of surrogate pairs in JSON. Clients in JavaScript that cut a text in the middle of an emoji send `\\ud83d`.

JSON allows such an escape, but it is no character, so the decoder refuses the whole body.
"""

from __future__ import annotations

import re
from collections.abc import Generator

REPLACEMENT = rb"\ufffd"  # has the same length as the escape that it replaces
_BACKSLASH = ord("\\")
# A pair, or half of one.
_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]|[89a-fA-F])[0-9a-fA-F]{2}")


def as_sent(value: bytes, readable: bytes | bytearray, sent: bytes | bytearray) -> bytes:
    """Return a value of a readable body with its original bytes, including halves of surrogate pairs."""
    if REPLACEMENT not in value:
        return value
    at = readable.find(value)
    return bytes(sent[at : at + len(value)])


def without_halves(body: bytearray) -> Generator[None, None, list[int]]:
    """Replace halves of surrogate pairs in a body, and return their offsets. Yields after each piece of work."""
    places = []
    at = 0
    while match := _SURROGATE.search(body, at):
        at = match.start()
        first_backslash = at
        while first_backslash and body[first_backslash - 1] == _BACKSLASH:
            first_backslash -= 1
        is_escape = (at - first_backslash) % 2 == 0
        is_half = len(match[0]) == len(REPLACEMENT)
        if is_escape and is_half:
            places.append(at)
        at += len(REPLACEMENT) if is_half or not is_escape else len(match[0])
        yield
    for at in places:
        body[at : at + len(REPLACEMENT)] = REPLACEMENT
    return places
