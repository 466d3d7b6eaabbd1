"""Reads the fields of a multipart/form-data body that is in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from multipart import MultipartError, MultipartParser

from oaiserve.errors import InvalidRequest

MOST_FIELDS = 64
MOST_FIELD_BYTES = 64 * 1024
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Form:
    """The fields of a form by name, each with its values in their order, and its files by the names of their fields."""

    fields: Mapping[str, list[str]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def read_form(content_type: str, content: bytes | bytearray) -> Form:
    """Return the fields and files of a form. Raises InvalidRequest."""
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise _malformed("its content type has no boundary of 1 to 200 characters")
    fields: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    parser = MultipartParser(
        _Bytes(content),
        boundary[1] or boundary[2],
        content_length=len(content),
        memory_limit=len(content) + 1,  # All of it is in memory already.
        disk_limit=0,
        part_limit=MOST_FIELDS,
        spool_limit=len(content) + 1,
    )
    try:
        for part in parser:
            if part.filename or part.name == "file":
                if part.name in files:
                    raise _malformed(f"it has two files of the name {part.name[:80]!r}")
                files[part.name] = part.raw
            elif part.size > MOST_FIELD_BYTES:
                raise _malformed(f"the field {part.name[:80]!r} has more than {MOST_FIELD_BYTES} bytes")
            else:
                fields.setdefault(part.name.removesuffix("[]"), []).append(part.raw.decode())
    except UnicodeDecodeError:
        raise _malformed("a field is not in UTF-8") from None
    except MultipartError as error:
        raise _malformed(f"{str(error)[:1].lower()}{str(error)[1:]}") from None
    return Form(fields, files)


def model_in_form(content_type: str, content: bytes | bytearray) -> str:
    """Return the model that a form names; "" if it names none or cannot be read, which its route reports."""
    try:
        return read_form(content_type, content).fields.get("model", [""])[-1].strip()
    except InvalidRequest:
        return ""


class _Bytes:
    """A body that a parser reads, without a copy of all of it."""

    def __init__(self, content: bytes | bytearray) -> None:
        self._content = memoryview(content)
        self._at = 0

    def read(self, number: int = -1) -> bytes:
        end = len(self._content) if number < 0 else self._at + number
        piece = self._content[self._at : end]
        self._at += len(piece)
        return bytes(piece)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The form cannot be read: {reason}.", param="file")
