"""The error of an impossible constraint, with the reason. Stdlib only."""

from __future__ import annotations


class Refused(Exception):
    """A constraint is broken, contradictory, too large or not supported.

    The reason is the end of a sentence, such as "the schema's keyword 'not' at $.properties.a.not is not supported".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
