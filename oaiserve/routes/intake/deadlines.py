"""Reads the deadlines of a request for its first token and for its end. Each is in a header or in a field of the
body."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.routes.intake.body_types import MAX_DEADLINE_MS
from oaiserve.routes.intake.invalid import show
from oaiserve.routes.intake.parameters import integer


def deadline_ns(headers: Mapping[str, str], body: msgspec.Struct, name: str) -> int | None:
    """Return the nanoseconds from the receipt of a request to one of its deadlines, by the name of its field.

    If both the header and the body set it, the earlier one counts, so that a proxy can shorten it. Raises
    InvalidRequest.
    """
    header = f"x-{name.replace('_', '-')}"
    text = headers.get(header)
    deadlines = [] if text is None else [_milliseconds(header, text)]
    if hasattr(body, name) and (in_body := integer(body, name)) is not None:
        deadlines.append(in_body)
    if deadlines:
        return min(deadlines) * 1_000_000
    return None


def _milliseconds(header: str, text: str) -> int:
    if len(text) < 10 and text.isascii() and text.isdigit():
        number = int(text)
    else:
        number = 0
    if not 1 <= number <= MAX_DEADLINE_MS:
        limits = f"must be an integer of milliseconds from 1 to {MAX_DEADLINE_MS}"
        raise InvalidRequest(f"Invalid header '{header}': {limits}, got {show(text)}.", param=header)
    return number
