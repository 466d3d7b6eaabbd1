"""The error of a constraint that cannot be obeyed, with the reason. Stdlib only."""

from __future__ import annotations


class Refused(Exception):
    """A constraint is broken, contradictory, too large or not supported.

    The reason is the end of a sentence, such as "the schema's keyword 'not' at $.properties.a.not is not supported".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
