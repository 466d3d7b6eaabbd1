"""Reads what a client's body asks for. The body is passed on as it came, whatever it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from oaiserve.plugins.gateway.sources import UNREADABLE

_NO_PARAMS = ("model", "stream")  # All other fields are parameters, which accounts show.


class Body(msgspec.Struct):
    """The fields that are read. A client may put any values there."""

    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None

    @property
    def model_name(self) -> str | None:
        return self.model if isinstance(self.model, str) else None

    @property
    def params(self) -> Mapping[str, int | float]:
        named = msgspec.structs.asdict(self).items()
        return {name: value for name, value in named if name not in _NO_PARAMS and type(value) in (int, float)}

    @property
    def max_answer_tokens(self) -> int | None:
        """The limit of one answer, or None if there is none."""
        limits = (self.max_completion_tokens, self.max_tokens)
        return next((limit for limit in limits if type(limit) is int and limit >= 0), None)

    @property
    def num_choices(self) -> int:
        return self.n if type(self.n) is int and 0 < self.n < 1024 else 1


_body = msgspec.json.Decoder(Body)


def body_of(content: bytes | bytearray) -> Body:
    """Return the parameters of a body, or none if it can't be read."""
    try:
        return _body.decode(content)
    except UNREADABLE:
        return Body()
