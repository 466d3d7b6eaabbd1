"""The parameters in a route's query: declared once, for the check and for the published schema."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import QueryParams

from oaiserve.routes.invalid import invalid, show


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter: a text, one of the texts in `allowed`, or an integer from 1 to `most`."""

    name: str
    meaning: str
    allowed: tuple[str, ...] | None = None
    is_integer: bool = False
    most: int | None = None

    def schema(self) -> dict[str, Any]:
        if self.is_integer:
            return {"type": "integer", "minimum": 1} | ({} if self.most is None else {"maximum": self.most})
        return {"type": "string"} | ({} if self.allowed is None else {"enum": list(self.allowed)})

    def value(self, given: str) -> Any:
        """Return the value of a given text. Raises InvalidRequest."""
        if self.is_integer:
            return self._integer(given)
        if self.allowed is not None and given not in self.allowed:
            raise invalid(self.name, f"must be one of {', '.join(self.allowed)}, got {show(given)}")
        return given

    def _integer(self, given: str) -> int:
        is_integer = given.isascii() and given.isdecimal() and len(given) <= 9
        if not is_integer or int(given) < 1 or (self.most is not None and int(given) > self.most):
            allowed = ">= 1" if self.most is None else f"from 1 to {self.most}"
            raise invalid(self.name, f"must be an integer {allowed}, got {show(given)}")
        return int(given)


def read_query(query: QueryParams, parameters: Sequence[Parameter]) -> dict[str, Any]:
    """Return the value of each parameter, or None without one. Raises InvalidRequest."""
    known = {parameter.name for parameter in parameters}
    for name in query:
        if name not in known:
            raise invalid(name[:80], f"this route takes {', '.join(parameter.name for parameter in parameters)}")
    given = {parameter: query.get(parameter.name) for parameter in parameters}
    return {parameter.name: None if text is None else parameter.value(text) for parameter, text in given.items()}
