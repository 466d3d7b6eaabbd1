"""Reads the multipart/form-data of an upload as it arrives: `UploadForm`.

Only headers and the purpose are held in memory, within bounds. The content of the file is written as it arrives. A
multipart or a message within a field is content.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import IO, Any
from urllib.parse import unquote_to_bytes

from multipart import MultipartError, MultipartSegment, ParserLimitReached, PushMultipartParser

from oaiserve.errors import InvalidRequest
from oaiserve.plugins.batches.line_ends import CrLf
from oaiserve.plugins.batches.objects import GIVEN_PURPOSES, GivenPurpose, is_utf16
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.intake.invalid import invalid, show

MOST_FIELDS = 32
MOST_HEADERS = 8  # headers of one field
MOST_HEADER_BYTES = 8192
MOST_BOUNDARY_BYTES = 200
MOST_PURPOSE_BYTES = 200
MOST_NAME_CHARACTERS = 255
# A parameter of a header: a token, and a quoted string or another token.
_PARAMETER = re.compile(rb';\s*([^\s=;"]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^\s;]*)', re.DOTALL)
_UNCHANGED = (b"", b"7bit", b"8bit", b"binary")  # encodings that leave a field as it is
_QUOTED_PAIR = re.compile(rb'\\(["\\])')
_EXTENDED = re.compile(rb"(?:utf-?8)?'[^']*'(.*)", re.IGNORECASE | re.DOTALL)  # charset, language and text
_MEDIA_TYPE = re.compile(rb"[a-z0-9][a-z0-9!#$&^_.+-]{0,126}/[a-z0-9][a-z0-9!#$&^_.+-]{0,126}")
_ESCAPED = {b"%22": b'"', b"%0D": b"\r", b"%0A": b"\n"}  # Browsers escape only these in names.


class UploadForm:
    """The fields of an upload. Its methods raise InvalidRequest as soon as something is wrong."""

    def __init__(self, content_type: str, content: IO[bytes], purpose: GivenPurpose | None = None) -> None:
        """`content` receives the content of the file. `purpose` is that of a form without the field; without it, a form
        must have the field."""
        boundary = _parameters(content_type.encode("latin-1", "replace")).get(b"boundary", b"")
        if not 1 <= len(boundary) <= MOST_BOUNDARY_BYTES:
            raise _malformed(f"its content type must have a boundary of 1 to {MOST_BOUNDARY_BYTES} characters")
        self._parser = PushMultipartParser(
            boundary, max_header_size=MOST_HEADER_BYTES, max_header_count=MOST_HEADERS, header_charset="latin-1"
        )
        self._lines = CrLf(boundary)
        self._content = content
        self._names: list[str] = []
        self._raw_purpose = b""
        self._start = b""  # start of the content
        self._required = {"file"} if purpose else {"file", "purpose"}
        self._given_purpose = purpose  # replaced when its field ends
        self.filename = "file"
        self.media_type = ""  # from the file part's header, without parameters
        self.num_bytes = 0  # bytes of the content

    @property
    def purpose(self) -> GivenPurpose:
        assert self._given_purpose is not None
        return self._given_purpose

    def feed(self, data: bytes) -> None:
        self._parse(self._lines.fed(data))

    def _parse(self, data: bytes) -> None:
        if not data:  # The parser would take it as the end.
            return
        try:
            for event in self._parser.parse(data):
                if event is None:
                    self._end_field()
                elif isinstance(event, MultipartSegment):
                    self._begin_field(event)
                else:
                    self._take(event)
        except ParserLimitReached:
            limits = f"at most {MOST_HEADERS} of {MOST_HEADER_BYTES} bytes each"
            raise _malformed(f"a field's headers are too long or too many, {limits} are read") from None
        except MultipartError as error:
            raise _malformed(f"{str(error)[:1].lower()}{str(error)[1:]}") from None

    def end(self, adaptations: Adaptations) -> None:
        """Check that the form is complete. Unknown fields are noted."""
        self._parse(self._lines.rest())
        try:
            self._parser.close()
        except MultipartError:
            if self._names:
                reason = "it is cut off: its last boundary is missing"
            else:
                reason = "it does not have its boundary"
            raise _malformed(reason) from None
        if not self._required <= {*self._names}:
            fields = "fields 'file' and 'purpose'" if len(self._required) > 1 else "field 'file'"
            raise InvalidRequest(f"The form must have the {fields}.", param="file")
        if {*self._names} - {"file", "purpose"}:
            adaptations.note("form", "fields other than 'file' and 'purpose' are left out")

    def check_encoding(self) -> None:
        """Check the beginning of a batch's file, as far as it has arrived."""
        if self._given_purpose == "batch" and is_utf16(self._start):
            raise invalid("file", "must be in UTF-8 for a batch, but is in UTF-16 or UTF-32")

    def _begin_field(self, segment: Any) -> None:
        headers = {name.lower(): value.encode("latin-1") for name, value in segment.headerlist}
        parameters = _parameters(headers.get("content-disposition", b""))
        name = _text(parameters, b"name") or ""
        if name in self._names:
            raise _malformed("it has two fields of one name")
        self._names.append(name)
        if len(self._names) > MOST_FIELDS:
            raise _malformed(f"it has more than {MOST_FIELDS} fields")
        if headers.get("content-transfer-encoding", b"").strip().lower() not in _UNCHANGED:
            raise _malformed("a field has a content-transfer-encoding, which fields of a form must not have")
        filename = _text(parameters, b"filename")
        if filename and len(filename) > MOST_NAME_CHARACTERS:
            raise InvalidRequest(
                f"The name of a file must have at most {MOST_NAME_CHARACTERS} characters, got {len(filename)}. "
                "Upload it under a shorter name.",
                param="file",
            )
        if name == "file":
            self.filename = filename or "file"
            media_type = headers.get("content-type", b"").partition(b";")[0].strip().lower()
            self.media_type = media_type.decode() if _MEDIA_TYPE.fullmatch(media_type) else ""

    def _take(self, data: bytes) -> None:
        name = self._names[-1]
        if name == "file":
            self._content.write(data)
            self.num_bytes += len(data)
            if len(self._start) < 4:
                self._start += data[:4]
        elif name == "purpose":
            self._raw_purpose = (self._raw_purpose + data)[: MOST_PURPOSE_BYTES + 1]

    def _end_field(self) -> None:
        if self._names[-1] == "purpose":
            purpose = self._raw_purpose.decode(errors="replace").strip()
            self._given_purpose = next((one for one in GIVEN_PURPOSES if one == purpose), None)
            if self._given_purpose is None:
                *others, last = map(repr, GIVEN_PURPOSES)
                raise invalid("purpose", f"must be {', '.join(others)} or {last}, got {show(purpose)}")


def _parameters(header: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a header. If a name occurs twice, the first one counts."""
    parameters: dict[bytes, bytes] = {}
    for name, value in _PARAMETER.findall(header):
        if value.startswith(b'"'):
            value = _QUOTED_PAIR.sub(rb"\1", value[1:-1])
        parameters.setdefault(name.lower(), value)
    return parameters


def _text(parameters: dict[bytes, bytes], name: bytes) -> str | None:
    """Return a parameter as text: `filename*` if it is in UTF-8, or else `filename`, whose encoding browsers and other
    clients choose."""
    if extended := _EXTENDED.fullmatch(parameters.get(name + b"*", b"")):
        with suppress(UnicodeDecodeError):
            return _printable(unquote_to_bytes(extended[1]).decode())
    plain = parameters.get(name)
    if plain is None:
        return None
    for escape, character in _ESCAPED.items():
        plain = plain.replace(escape, character)
    return _printable(_in_utf8(plain))


def _in_utf8(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _printable(text: str) -> str:
    """Return the text without characters that would affect a terminal or a log."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _malformed(reason: str) -> InvalidRequest:
    return InvalidRequest(f"The form cannot be read: {reason}.", param="file")
