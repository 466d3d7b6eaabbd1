"""Reads the head of a GGUF file for transformers without the texts of its vocabulary.

transformers has the package gguf read the head for a model's configuration, and once more for its tokenizer. That makes
several objects for each token and each merge, of which there are hundreds of thousands, and takes seconds. All that is
used of them is how many there are: the tokenizer itself is then read in another way.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH = struct.Struct("<Q")


class _HeadReader(GGUFReader):
    """Reads arrays of texts as so many empty texts, and arrays of numbers at once.

    Should the package rename the method, files are read as before.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        begin = orig_offs + 4 + 8
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        is_native = self.byte_order == "I" and sys.byteorder == "little"
        if not is_native or raw_type != GGUFValueType.ARRAY or not count[0] or kind[0] == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        types, number = [GGUFValueType.ARRAY, GGUFValueType(kind[0])], int(count[0])
        if kind[0] == GGUFValueType.STRING:
            data, end = self.data.data, begin
            for _ in range(number):
                end += 8 + _LENGTH.unpack_from(data, end)[0]
            return end - orig_offs, [kind, count, self.data[:0]], [2] * number, types
        numbers = np.asarray(self._get(begin, self.gguf_scalar_to_np[types[1]], number))
        return begin + numbers.nbytes - orig_offs, [kind, count, *numbers[:, None]], list(range(2, 2 + number)), types


@contextmanager
def without_vocabulary() -> Iterator[None]:
    """Have transformers read heads in this way, within the block. Nothing else may use gguf's reader meanwhile."""
    before = gguf.GGUFReader
    gguf.GGUFReader = _HeadReader  # type: ignore[misc]
    try:
        yield
    finally:
        gguf.GGUFReader = before  # type: ignore[misc]
