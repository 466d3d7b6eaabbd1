"""Finds the end of an object in JSON text that comes in pieces, by its brackets and strings."""

from __future__ import annotations

import re

# Characters of a string up to its end, or up to an escape that is not whole.
_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+')
# Brackets, quotes, and characters that JSON has only in strings.
_OUTSIDE = re.compile(r'["{}\[\]]|[^\s,:0-9.eE+\-truefalsn]')


class BrokenJson(Exception):
    """The text is no JSON from the place `at` on."""

    def __init__(self, at: int) -> None:
        super().__init__(at)
        self.at = at


class JsonScanner:
    """It checks no more than it needs to find the end: whether the object is JSON is for a decoder to say."""

    def __init__(self) -> None:
        self.depth = 0  # of open brackets
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str, at: int, to_depth: int) -> int | None:
        """Go on with `text` from the place `at`, until a bracket closes down to the depth `to_depth`.

        Return the place behind it, or None if the text ends first. Raises BrokenJson.
        """
        while at < len(text):
            if self._in_string:
                at = self._end_of_string(text, at)
                continue
            match = _OUTSIDE.search(text, at)
            if match is None:
                return None
            at, character = match.end(), match[0]
            if character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == to_depth:
                    return at
            else:
                raise BrokenJson(at - 1)
        return None

    def _end_of_string(self, text: str, at: int) -> int:
        """Return the place behind the string at `at`, or the end of the text. Raises BrokenJson."""
        if self._is_escaped:
            if text[at] < " ":
                raise BrokenJson(at)
            self._is_escaped = False
            at += 1
        if match := _IN_STRING.match(text, at):
            at = match.end()
        if at == len(text):
            return at
        if text[at] == '"':
            self._in_string = False
        elif text[at] == "\\" and at + 1 == len(text):
            self._is_escaped = True
        else:
            raise BrokenJson(at + (text[at] == "\\"))
        return at + 1
