"""Reads the multipart/form-data of an upload: `read_form`.

The body is in memory already. It is searched once, and a field's content is never copied until it is used, so that
neither memory nor CPU time depends on what a client puts into it. A multipart or a message within a field is content.
"""

from __future__ import annotations

import re
from binascii import Error, a2b_base64, a2b_qp
from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from oaiserve.errors import InvalidRequest

MOST_FIELDS = 32
MOST_HEAD_BYTES = 8192  # of a field's headers
MOST_BOUNDARY_BYTES = 200
MOST_DELIMITER_BYTES = MOST_BOUNDARY_BYTES + 110
PIECE_BYTES = 2**20  # searched at once, for which no other thread runs
MOST_NAME_CHARACTERS = 255
# A parameter of a header: a token, and a quoted string or another token.
_PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s;]*)', re.DOTALL)
_QUOTED_PAIR = re.compile(rb'\\(["\\])')
_ESCAPED = {b"%22": b'"', b"%0D": b"\r", b"%0A": b"\n"}  # as browsers escape these in names, and nothing else
_DECODERS: dict[str, Callable[[bytearray], bytes]] = {"base64": a2b_base64, "quoted-printable": a2b_qp}


class Field(NamedTuple):
    """A field of a form: where its content begins and ends in the body."""

    filename: str | None
    start: int
    end: int
    encoding: str  # its content-transfer-encoding, which hardly any client uses

    def content(self, body: bytearray, most_bytes: int | None = None) -> bytes | bytearray:
        """Return the content, or the first bytes of it. Raises InvalidRequest."""
        end = self.end if most_bytes is None else min(self.end, self.start + most_bytes)
        return self._decoded(body[self.start : end])

    def take_content(self, body: bytearray) -> bytes | bytearray:
        """Return the content as `content` does, without a copy: it is what is left of the body."""
        del body[self.end :]
        del body[: self.start]
        return self._decoded(body)

    def _decoded(self, content: bytearray) -> bytes | bytearray:
        try:
            return _DECODERS[self.encoding](content) if self.encoding in _DECODERS else content
        except Error as error:
            raise _malformed(f"a field is not valid {self.encoding}") from error


def read_form(content_type: str, body: bytes | bytearray) -> dict[str, Field]:
    """Return the fields of a form by name. Raises InvalidRequest."""
    boundary = _parameters(content_type.encode("latin-1", "replace")).get(b"boundary", b"")
    if not 1 <= len(boundary) <= MOST_BOUNDARY_BYTES:
        raise _malformed(f"its content type must have a boundary of 1 to {MOST_BOUNDARY_BYTES} characters")
    delimiter = re.compile(rb"\n--" + re.escape(boundary) + rb"(?:(--)|[ \t]{0,100}\r?\n)")
    fields: dict[str, Field] = {}
    # The first delimiter may be at the start, where no line end is before it.
    found = delimiter.match(b"\n" + body[:MOST_DELIMITER_BYTES])
    end = -1 if found is None else found.end() - 1
    if found is None and (found := _search(delimiter, body, 0)) is not None:
        end = found.end()
    while found is not None and found[1] is None:
        # The end of the delimiter's line may be the empty line that ends no headers.
        blank = re.compile(rb"\n\r?\n").search(body, end - 1, end + MOST_HEAD_BYTES)
        following = None if blank is None else _search(delimiter, body, blank.end() - 1)
        if blank is None or following is None:
            raise _malformed("it is cut off, or a field's headers are too long")
        content_end = following.start() - (body[following.start() - 1 : following.start()] == b"\r")
        name, field = _field(bytes(body[end : blank.start()]), blank.end(), content_end)
        if name in fields:
            raise _malformed("it has two fields of one name")
        fields[name] = field
        if len(fields) > MOST_FIELDS:
            raise _malformed(f"it has more than {MOST_FIELDS} fields")
        found = following
        end = following.end()
    if found is None:
        raise _malformed("it does not have its boundary")
    return fields


def _search(pattern: re.Pattern[bytes], body: bytes | bytearray, start: int) -> re.Match[bytes] | None:
    """Return the next delimiter. In between, other threads may run."""
    for piece in range(start, len(body), PIECE_BYTES):
        if (found := pattern.search(body, piece, piece + PIECE_BYTES + MOST_DELIMITER_BYTES)) is not None:
            return found
    return None


def _field(head: bytes, start: int, end: int) -> tuple[str, Field]:
    """Return a field with its name, by its headers."""
    headers = {}
    for line in re.split(rb"\r?\n(?![ \t])", head):
        name, _, value = line.partition(b":")
        headers[name.strip().lower()] = value
    parameters = _parameters(headers.get(b"content-disposition", b""))
    filename = _text(parameters, b"filename")
    if filename is not None and len(filename) > MOST_NAME_CHARACTERS:
        raise InvalidRequest(
            f"The name of a file must have at most {MOST_NAME_CHARACTERS} characters, got {len(filename)}.",
            param="file",
        )
    encoding = headers.get(b"content-transfer-encoding", b"").strip().lower().decode("latin-1")
    return _text(parameters, b"name") or "", Field(filename or None, start, max(start, end), encoding)


def _parameters(header: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a header. The first of two with one name counts."""
    found: dict[bytes, bytes] = {}
    for name, value in _PARAMETER.findall(header):
        if value.startswith(b'"'):
            value = _QUOTED_PAIR.sub(rb"\1", value[1:-1])
        found.setdefault(name.lower(), value)
    return found


def _text(parameters: dict[bytes, bytes], name: bytes) -> str | None:
    """Return a parameter as text: of `filename*`, which says how it is encoded, its parts `filename*0` and so on (RFC
    2231), and `filename`, whose encoding browsers and other clients choose, the first one that there is."""
    extended = parameters.get(name + b"*")
    if extended is None and (parts := _continued(parameters, name)):
        if not parts[0][0].endswith(b"*"):
            return _printable(_in_utf8(b"".join(value for _, value in parts)))
        texts = (value if part.endswith(b"*") else value.replace(b"%", b"%25") for part, value in parts)
        extended = b"".join(texts)
    if extended is not None and extended.count(b"'") >= 2:
        charset, _, text = extended.split(b"'", 2)
        try:
            return _printable(unquote_to_bytes(text).decode(charset.decode("ascii") or "utf-8"))
        except (LookupError, ValueError):  # an unknown charset, or bytes that it does not have
            pass
    plain = parameters.get(name)
    if plain is None:
        return None
    for escape, character in _ESCAPED.items():
        plain = plain.replace(escape, character)
    return _printable(_in_utf8(plain))


def _continued(parameters: dict[bytes, bytes], name: bytes) -> list[tuple[bytes, bytes]]:
    parts: list[tuple[bytes, bytes]] = []
    while True:
        numbered = b"%s*%d" % (name, len(parts))
        part = next((each for each in (numbered + b"*", numbered) if each in parameters), None)
        if part is None:
            return parts
        parts.append((part, parameters[part]))


def _in_utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _printable(text: str) -> str:
    """Return the text without characters that would do something to a terminal or a log."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The form cannot be read: {reason}.", param="file")
