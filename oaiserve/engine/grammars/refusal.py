"""Defines the error that says why a constraint cannot be obeyed. Stdlib only."""

from __future__ import annotations


class Refused(Exception):
    """A constraint is broken, contradictory or too large, or asks for what this server cannot hold an answer to.

    The reason is the end of a sentence, such as "the schema's keyword 'not' at $.properties.a.not is not supported".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
