"""Reads the head of a GGUF file for transformers without the texts of its vocabulary.

The package gguf reads the head for transformers twice: for a model's configuration and for its tokenizer. That makes
several objects for each of hundreds of thousands of tokens and merges, and takes seconds. Only the number of tokens is
used: the tokenizer itself is then read by a second pass over the vocabulary, which cuts each text out of an array, and
takes four times as long as cutting it out of memory.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType, ReaderField

_LENGTH = struct.Struct("<Q")
_ARRAY = struct.Struct("<IQ")
_TOKENIZER = "tokenizer."
_TOKENS = "tokenizer.ggml.tokens"
_VOCAB_SIZE = ".vocab_size"


class _HeadReader(GGUFReader):
    """Reads arrays of texts as arrays of empty texts, and arrays of numbers at once.

    If the package renames the methods, files are read as before.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        begin = orig_offs + 4 + 8
        kind = self._get(orig_offs, np.uint32)
        count = self._get(orig_offs + 4, np.uint64)
        is_native = self.byte_order == "I" and sys.byteorder == "little"
        if not is_native or raw_type != GGUFValueType.ARRAY or not count[0] or kind[0] == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        types = [GGUFValueType.ARRAY, GGUFValueType(kind[0])]
        number = int(count[0])
        if kind[0] == GGUFValueType.STRING:
            end = _end_of_texts(self.data.data, begin, number)
            return end - orig_offs, [kind, count, self.data[:0]], [2] * number, types
        numbers = np.asarray(self._get(begin, self.gguf_scalar_to_np[types[1]], number))
        return begin + numbers.nbytes - orig_offs, [kind, count, *numbers[:, None]], list(range(2, 2 + number)), types

    def _push_field(self, field: ReaderField, skip_sum: bool = False) -> int:
        """Keep a field; among the tokenizer's, keep only the tokens, for their number."""
        is_counted = field.name == _TOKENS and not any(name.endswith(_VOCAB_SIZE) for name in self.fields)
        if field.name.startswith(_TOKENIZER) and len(field.data) > 1 and not is_counted:
            field = field._replace(data=[])
        return super()._push_field(field, skip_sum)


_changing = Lock()
_num_reading = 0  # active blocks of `without_vocabulary`


@contextmanager
def without_vocabulary() -> Iterator[None]:
    """Make transformers read heads in this way within the block. Several threads may do so at once, but nothing else
    may use gguf's reader during that time."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    """Count a `with` block at its start or end. The first one installs our readers, and the last one removes them."""
    global _num_reading
    from transformers.integrations.gguf import reader

    other: Any = reader  # transformers' own
    with _changing:
        _num_reading += change
        gguf.GGUFReader = _HeadReader if _num_reading else GGUFReader  # type: ignore[misc]
        read = getattr(other, "_read_value", None)
        if read is not None and _num_reading == (change > 0):
            if _num_reading:
                other._read_value = _ValueReader(read)
            else:
                other._read_value = read.others


class _ValueReader:
    """Reads the value at a place as transformers does, with arrays of texts at once."""

    def __init__(self, others: Callable[..., tuple[Any, int]]) -> None:
        """`others` reads everything except arrays of texts."""
        self.others = others

    def __call__(self, file: np.ndarray, place: int, kind: int, keep_strings: bool = False) -> tuple[Any, int]:
        """Return a value, or the number of the texts unless these are wanted, and the place after it."""
        data = file.data
        if kind != GGUFValueType.ARRAY or _ARRAY.unpack_from(data, place)[0] != GGUFValueType.STRING:
            return self.others(file, place, kind, keep_strings)
        _, number = _ARRAY.unpack_from(data, place)
        end = place + _ARRAY.size
        if not keep_strings:
            return number, _end_of_texts(data, end, number)
        texts = []
        for _ in range(number):
            begin = end + _LENGTH.size
            end = begin + _LENGTH.unpack_from(data, end)[0]
            texts.append(str(data[begin:end], "utf-8"))
        return texts, end


def _end_of_texts(data: memoryview, begin: int, number: int) -> int:
    end = begin
    length_of = _LENGTH.unpack_from
    length_bytes = _LENGTH.size
    for _ in range(number):
        end += length_bytes + length_of(data, end)[0]
    return end
