"""`ThinkingParser`: splits an answer into its reasoning, between two tags, and its content."""

from __future__ import annotations

from oaiserve.routes.dialects import tags


class ThinkingParser:
    """Takes the text of one answer in pieces. Whitespace next to the tags belongs to them, except before the last.

    The opening tag may be missing if the prompt ends with it: then `is_open`. Otherwise an answer without it has no
    reasoning.
    """

    def __init__(self, opening: str, closing: str, *, is_open: bool) -> None:
        self.is_over = False
        self.end = 0  # characters of the text up to the end of the reasoning, with its tags, as far as it has come
        self._opening = opening
        self._closing = closing
        self._is_open = is_open
        self._has_begun = False
        self._held = ""
        self._skips_space = True

    def push(self, text: str) -> tuple[str, str]:
        """Take the next piece of the text. Return the reasoning in it, and the text behind the reasoning."""
        self._held += text
        if not self._has_begun:
            rest = self._held.lstrip()
            if rest.startswith(self._opening):
                self.end += len(self._held) - len(rest) + len(self._opening)
                self._held, self._has_begun = rest[len(self._opening) :], True
            elif self._opening.startswith(rest):
                return "", ""
            elif self._is_open:
                self._has_begun = True
            else:
                self.is_over = True
                return "", self._take(len(self._held))
        if self._skips_space:
            rest = self._held.lstrip()
            self.end += len(self._held) - len(rest)
            self._held = rest
            self._skips_space = not rest
        at, tag = tags.find(self._held, (self._closing,))
        reasoning = self._take(at)
        self.end += at
        if not tag:
            return reasoning, ""
        self.end += len(tag)
        self.is_over = True
        return reasoning, self._take(len(self._held))[len(tag) :]

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the text: reasoning, and content."""
        text, self.is_over = self._take(len(self._held)), True
        if self._has_begun or self._is_open:
            self.end += len(text)
            return text, ""
        return "", text

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken
