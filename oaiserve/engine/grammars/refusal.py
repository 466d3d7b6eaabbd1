"""The error of an impossible constraint, with the reason. Stdlib only."""

from __future__ import annotations


class Refused(Exception):
    """A constraint is broken, contradictory, too large or not supported.

    The reason is the end of a sentence, such as "the schema's keyword 'not' at $.properties.a.not is not supported".
    """

    def __init__(self, reason: str, keyword: str = "") -> None:
        """`keyword` is the one to leave out where a schema is obeyed as far as possible."""
        super().__init__(reason)
        self.reason = reason
        self.keyword = keyword


class Contradiction(Refused):
    """No value is valid under a schema, because its keywords contradict each other."""
