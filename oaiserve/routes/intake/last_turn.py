"""The user's last turn in a conversation: what it has must be readable, and the rest may be left out."""

from __future__ import annotations

from collections.abc import Sequence


def first_asked(roles: Sequence[object]) -> int:
    """Return the index of the first message of the user's last turn, which may have several messages."""
    last = max((number for number, role in enumerate(roles) if role == "user"), default=len(roles))
    while last and roles[last - 1] in ("user", "system", "developer"):
        last -= 1
    return last
