"""`Adaptations`: the parts of a request that were left out or read differently, for its response header and account.

Lenient reading is never silent. A note names a place in the body and says what happened there. It contains no text from
the client, since notes get into logs.
"""

from __future__ import annotations

from collections.abc import Callable

HEADER = "x-oaiserve-adapted"
MOST_NOTES = 20
MOST_CHARACTERS = 120  # characters of a note
Note = Callable[[str, str], None]  # takes a place and what happened there, as `Adaptations.note` does
STORED = "the stored item "  # prefix of a place in an item that is not in the body


def not_enforced(keyword: str) -> str:
    """Return a note's text about a keyword that no grammar enforces; "" stands for a whole schema."""
    return f"'{keyword}' is not enforced" if keyword else "the schema is not enforced"


class Adaptations:
    """The notes on one request, in the order in which they were first made."""

    def __init__(self) -> None:
        self._notes: dict[str, None] = {}
        self._num_more = 0

    def note(self, place: str, what: str) -> None:
        """Add a note, such as ``note("messages[2].content[0]", "server_tool_use is left out")``.

        Both are in printable ASCII. Characters that are not allowed in a header become '?'. Ids of stored items are
        left out."""
        place = "a stored item" if place.startswith(STORED) else place
        text = f"{place}: {what}"[:MOST_CHARACTERS]
        if not (text.isascii() and text.isprintable()) or ";" in text:
            text = "".join(letter if " " <= letter <= "~" and letter != ";" else "?" for letter in text)
        if len(self._notes) < MOST_NOTES or text in self._notes:
            self._notes[text] = None
        else:
            self._num_more += 1

    @property
    def notes(self) -> tuple[str, ...]:
        more = [f"{self._num_more} more"] if self._num_more else []
        return (*self._notes, *more)

    def headers(self) -> dict[str, str]:
        """Return the response header, or nothing if the request was read to the letter."""
        if self._notes:
            return {HEADER: "; ".join(self.notes)}
        return {}
