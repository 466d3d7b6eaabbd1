"""Reads the head of a GGUF file, and refuses one whose counts, sizes or numbers cannot be true. Stdlib only."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import IO, Any

from oaiserve.model_numbers import BadFile, check_numbers

_STRING, _ARRAY = 8, 9
# By the number of the type: its format for `struct`.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Gguf:
    """Reads the parts of a GGUF file one after the other. Raises BadFile where the file ends before a part does."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        self._file, self.size, self._at = file, size, 0

    def number(self, form: str) -> Any:
        width = struct.calcsize(form)
        self._advance(width)
        return struct.unpack(f"<{form}", self._file.read(width))[0]

    def text(self) -> str:
        length = self.number("Q")
        self._advance(length)
        return self._file.read(length).decode(errors="replace")

    def value(self) -> Any:
        """Return a number, or None for a value of another kind."""
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            self.skip(self.number("Q"))
        elif kind == _ARRAY:
            self._skip_array()
        else:
            raise BadFile(f"it has a value of the unknown type {kind}")
        return None

    def _skip_array(self) -> None:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]))
        elif kind == _STRING:
            for _ in range(self.at_most(count, 8)):
                self.skip(self.number("Q"))
        else:
            raise BadFile(f"it has an array of the unknown type {kind}")

    def at_most(self, count: int, bytes_each: int) -> int:
        """Return the count, unless the rest of the file is too short for so many."""
        if count * bytes_each > self.size - self._at:
            raise BadFile("it is cut, or lies about its counts")
        return count

    def skip(self, num_bytes: int) -> None:
        self._advance(num_bytes)
        self._file.seek(num_bytes, 1)

    def _advance(self, num_bytes: int) -> None:
        self.at_most(num_bytes, 1)
        self._at += num_bytes


def check_gguf(path: Path) -> None:
    """Raise BadFile if the counts, sizes or numbers in the head of a GGUF file cannot be true."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadFile("it is no GGUF file")
        gguf = _Gguf(file, size - 4)
        version = gguf.number("I")
        if version not in (2, 3):
            raise BadFile(f"its GGUF version is {version}, but must be 2 or 3")
        num_tensors, num_values = gguf.number("Q"), gguf.number("Q")
        gguf.at_most(num_tensors, 24)
        values = {}
        for _ in range(gguf.at_most(num_values, 13)):
            key = gguf.text()
            values[key] = gguf.value()
        for _ in range(num_tensors):
            name, num_dimensions = gguf.text(), gguf.number("I")
            if num_dimensions > 8:
                raise BadFile(f"its tensor {name[:100]!r} has {num_dimensions} dimensions")
            num_elements = 1
            for _ in range(num_dimensions):
                num_elements *= gguf.number("Q")
            _kind, offset = gguf.number("I"), gguf.number("Q")
            if num_elements > 8 * size or offset > size:
                raise BadFile(f"its tensor {name[:100]!r} is larger than the file: it is cut, or lies about its sizes")
    check_numbers(values, num_tensors, size)
