"""What a client and the server send each other on a socket: the fields of a request, and events about errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from oaiserve.errors import APIError, InvalidRequest

Fields = dict[str, msgspec.Raw]  # The fields of a request by name.
_encode = msgspec.json.encode


def field_of(fields: Fields, name: str, kind: Any) -> Any:
    """Return a field of this type, or None if it is missing. Raises InvalidRequest."""
    try:
        return msgspec.json.decode(fields.get(name, b"null"), type=kind | None)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"Invalid '{name}': {error}.", param=name) from None


def items_of(fields: Fields) -> list[msgspec.Raw]:
    """Return the items of an input. Raises InvalidRequest."""
    value = field_of(fields, "input", str | list[msgspec.Raw])
    if isinstance(value, str):
        return [msgspec.Raw(_encode({"type": "message", "role": "user", "content": value}))]
    return value or []


def error_event(error: APIError) -> bytes:
    return _encode({"type": "error", "status": error.status, **error.body()})


def steer_failed(code: str, message: str, steer: Mapping[str, Any]) -> bytes:
    """Return the event that gives input back that steers no response."""
    error = {"type": "invalid_request_error", "code": code, "message": message}
    return _encode({"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer})
