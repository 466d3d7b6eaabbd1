"""Reads the head of a GGUF file, everything before its tensors' data, and rejects impossible counts or sizes. Stdlib
only.

A large model may be split into several files, its shards. The first one has all metadata, and each has some of the
tensors.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from oaiserve.checkpoints.bad_file import BadFile, check_numbers, reason_of, refuse_other_content

_STRING = 8
_ARRAY = 9
# Formats for `struct`, keyed by the number of the value's type.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# The elements and the bytes of a quantized block, keyed by the number of the tensor's type.
_BLOCKS = {
    0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2),
    2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 40), 20: (32, 18), 39: (32, 17),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110), 22: (256, 82), 23: (256, 136),
    29: (256, 56), 34: (256, 54), 35: (256, 66), 40: (64, 36), 41: (128, 18),
}  # fmt: skip
_ALIGNMENT = "general.alignment"
_ARCHITECTURE = "general.architecture"
_TOKENIZER = "tokenizer."  # prefix of the names of the tokenizer's metadata
BLOCK_COUNT = ".block_count"  # suffix of the setting with the number of layers
_NUM_SHARDS = "split.count"
SHARD = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")  # matches the end of a shard's name
# Limits of counts. Readers create a few Python objects per entry. The largest models need a tenth of these.
_MOST_VALUES = 2**16
_MOST_TENSORS = 2**18
_MOST_ELEMENTS = 2**21
_MOST_NAME_BYTES = 2**16
_MOST_TEXT_BYTES = 2**24
_MOST_DEPTH = 8  # most levels of nested arrays
_LEAST_ARRAY_BYTES = 12
# Limits of the values that are kept: names and numbers of layers are short enough, templates and vocabularies are not.
_MOST_KEPT_BYTES = 256
_MOST_KEPT_NUMBERS = 1024
_MOST_SHOWN_PARTS = 10  # most names of missing parts in a message
_MOST_SHOWN_BYTES = 16  # most bytes in a message about a file that is not GGUF
_LENGTH = struct.Struct("<Q")


class GgufTensor(NamedTuple):
    """A tensor, and the offsets in its file at which its data begin and end."""

    begin: int
    end: int
    name: str
    kind: int  # the number of its type
    shape: tuple[int, ...]  # The last dimension is contiguous.
    shard: int = 0  # the number of the file that contains it


class _FileHead(NamedTuple):
    """The head of one file."""

    values: dict[str, Any]
    long_values: dict[str, int]
    tensors: list[GgufTensor]


class _Gguf:
    """Reads a mapped GGUF file from its start, value by value. Raises BadFile if the file ends within a value."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.size = len(data)
        self._at = 4

    @property
    def place(self) -> int:
        return self._at

    def value_at(self, place: int) -> Any:
        """Return the whole value that begins at this position."""
        self._at = place
        return self.value(is_whole=True)

    def number(self, form: str) -> Any:
        return self._numbers(1, form)[0]

    def name(self) -> str:
        length = self.number("Q")
        if length > _MOST_NAME_BYTES:
            raise BadFile(f"it has a name of {length} bytes")
        try:
            return self._data[self._advance(length) : self._at].decode()
        except UnicodeDecodeError as error:
            raise BadFile("it has a name that is no UTF-8") from error

    def value(self, *, is_whole: bool = False) -> Any:
        """Return a number, a short text or a short list of numbers, or None for any other value. With `is_whole`,
        return values of any length."""
        kind = self.number("I")
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            length = self.number("Q")
            begin = self._advance(length)
            is_kept = is_whole or length <= _MOST_KEPT_BYTES
            if is_kept:
                return self._data[begin : self._at].decode(errors="replace")
            return None
        if kind == _ARRAY:
            return self._array(is_whole)
        raise BadFile(f"it has a value of the unknown type {kind}")

    def _array(self, is_whole: bool, depth: int = 0) -> list[Any] | None:
        kind = self.number("I")
        count = self.number("Q")
        if kind in _SCALARS and not is_whole and count > _MOST_KEPT_NUMBERS:
            self._advance(count * struct.calcsize(_SCALARS[kind]))
            return None
        if count > _MOST_ELEMENTS:
            raise BadFile(f"it has an array of {count} values, but can have at most {_MOST_ELEMENTS}")
        if kind in _SCALARS:
            return list(self._numbers(count, _SCALARS[kind]))
        if kind == _ARRAY and depth < _MOST_DEPTH:  # No setting is an array of arrays, so none of them is kept.
            for _ in range(self.at_most(count, _LEAST_ARRAY_BYTES)):
                self._array(False, depth + 1)
        elif kind == _STRING:
            ends = self._text_ends(self.at_most(count, 8))
            begin = self._advance(ends[-1] - self._at if ends else 0) + _LENGTH.size
            if is_whole:
                begins = (begin, *(end + _LENGTH.size for end in ends))
                return [self._data[at:end].decode(errors="replace") for at, end in zip(begins, ends, strict=False)]
        else:
            raise BadFile(f"it has an array of the unknown type {kind}")
        return None

    def _text_ends(self, count: int) -> list[int]:
        at = self._at
        ends = []
        for _ in range(count):
            if at + 8 > self.size:
                raise self._cut(at + 8)
            (length,) = _LENGTH.unpack_from(self._data, at)
            if length > _MOST_TEXT_BYTES:
                raise BadFile(f"it has a text of {length} bytes, but can have at most {_MOST_TEXT_BYTES}")
            at += 8 + length
            ends.append(at)
        return ends

    def at_most(self, count: int, bytes_each: int) -> int:
        """Return the count, unless the rest of the file is too short for it."""
        if count * bytes_each > self.size - self._at:
            raise self._cut(self._at + count * bytes_each)
        return count

    def _cut(self, least_bytes: int) -> BadFile:
        return BadFile(
            f"it is cut, or lies about its counts: it has {self.size:,} bytes, and needs at least {least_bytes:,}"
        )

    def left_behind(self, alignment: int) -> int:
        """Return the number of bytes that follow the next multiple of `alignment`."""
        return self.size - -(-self._at // alignment) * alignment

    def _numbers(self, count: int, form: str) -> tuple[Any, ...]:
        form = f"<{count}{form}"
        return struct.unpack_from(form, self._data, self._advance(struct.calcsize(form)))

    def _advance(self, num_bytes: int) -> int:
        begin = self._at
        self._at += self.at_most(num_bytes, 1)
        return begin


def shard_paths(path: Path) -> list[Path]:
    """Return the paths of all shards of a model, given the first one's path. Raises BadFile for the path of any other
    shard."""
    match = SHARD.search(path.name)
    if match is None:
        return [path]
    names = [f"{path.name[: match.start()]}-{number + 1:05}-of-{match[2]}.gguf" for number in range(int(match[2]))]
    if not names or path.name != names[0]:
        raise BadFile(f"it is not the first part of its model, {path.name[: match.start()]}-00001-of-{match[2]}.gguf")
    return [path.with_name(name) for name in names]


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The heads of a model's files: everything before the data of their tensors."""

    paths: tuple[Path, ...]  # paths of its shards
    # By name, numbers, short texts and short lists of numbers; None for other values.
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    # Positions of the tokenizer's long values, which are None in `values`.
    _long_values: Mapping[str, int]

    def read_tokenizer(self) -> dict[str, Any]:
        """Return all metadata of the tokenizer by name, including long values, and the model's architecture. Raises
        BadFile."""
        values = {key: value for key, value in self.values.items() if key.startswith((_TOKENIZER, _ARCHITECTURE))}
        with _opened(self.paths[0]) as (gguf, _, _):
            return values | {key: gguf.value_at(place) for key, place in self._long_values.items()}

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of the head of one of the files. `path` may be the target of its symbolic link."""
        shard = [each.resolve() for each in self.paths].index(path.resolve())
        begin = min((tensor.begin for tensor in self.tensors.values() if tensor.shard == shard), default=-1)
        with path.open("rb") as file:
            return hashlib.sha256(file.read(begin)).hexdigest()


def architecture(values: Mapping[str, Any]) -> str | None:
    """Return the model's family: the prefix of the names of its sizes, or else the name that the file states."""
    named = values.get(_ARCHITECTURE)
    prefix = prefix_of_sizes(values)
    # A model with several parts has sizes for each, such as whisper.encoder.block_count.
    if isinstance(named, str) and (prefix is None or prefix.startswith(f"{named}.")):
        return named
    return prefix


def prefix_of_sizes(values: Mapping[str, Any]) -> str | None:
    """Return the prefix of the names of a model's sizes, such as "llama", or "clip.vision" for a vision tower."""
    return next((key.removesuffix(BLOCK_COUNT) for key in values if key.endswith(BLOCK_COUNT)), None)


def read_head(path: Path) -> GgufHead:
    """Read the head of a model's file, or of all its shards.

    Raises BadFile if the counts, sizes, offsets or numbers in it contradict each other or the files.
    """
    paths = shard_paths(path)
    first = _read_file(path)
    values = first.values
    number = values.get(_NUM_SHARDS) or 1
    if number != len(paths):
        if type(number) is int and 1 < number < 10**5:
            ending = f"-00001-of-{number:05}.gguf"
        else:
            ending = ".gguf"
        raise BadFile(f"its {_NUM_SHARDS} is {number}, so its name must end with {ending}")
    _refuse_unless_complete(paths)
    tensors: dict[str, GgufTensor] = {}
    for shard, file in enumerate(paths):
        try:
            of_shard = _read_file(file).tensors if shard else first.tensors
        except (BadFile, OSError) as error:
            raise BadFile(f"of its part {file.name}: {reason_of(error)}") from error
        for tensor in of_shard:
            if tensor.name in tensors:
                raise BadFile(f"two of its parts have the tensor {tensor.name[:100]!r}")
            tensors[tensor.name] = tensor._replace(shard=shard)
    if tensors:  # A file with only a vocabulary also states the sizes of its model.
        check_numbers(_sizes(values), len(tensors), sum(file.stat().st_size for file in paths))
    return GgufHead(tuple(paths), values, tensors, first.long_values)


def _refuse_unless_complete(files: list[Path]) -> None:
    missing = [file.name for file in files if not file.exists()]
    if not missing:
        return
    is_or_are = "is" if len(missing) == 1 else "are"
    shown = ", ".join(missing[:_MOST_SHOWN_PARTS])
    if len(missing) > _MOST_SHOWN_PARTS:
        shown += f" and {len(missing) - _MOST_SHOWN_PARTS} more"
    raise BadFile(
        f"{len(missing)} of its {len(files)} parts {is_or_are} missing: put {shown} into the folder '{files[0].parent}'"
    )


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata of the model itself, whose names begin with its architecture. The rest describes the
    tokenizer or the file."""
    beginning = (architecture(values) or "").partition(".")[0]
    return {key: value for key, value in values.items() if beginning and key.startswith(f"{beginning}.")}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[_Gguf, int, int]]:
    """Open a file, and yield a reader of its metadata, the number of its tensors and the number of its metadata
    entries."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            refuse_other_content(path)
            file.seek(0)
            start = file.read(_MOST_SHOWN_BYTES)
            raise BadFile("it is no GGUF file: it " + (f"begins with {start!r}" if start else "is empty"))
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        gguf = _Gguf(data)
        version = gguf.number("I")
        if version in (2 << 24, 3 << 24):
            raise BadFile("its numbers are big-endian, as for IBM Z; take the little-endian file of the same model")
        if version not in (2, 3):
            raise BadFile(f"its GGUF version is {version}, but must be 2 or 3")
        num_tensors = gguf.number("Q")
        num_values = gguf.number("Q")
        gguf.at_most(num_tensors, 24)
        gguf.at_most(num_values, 13)
        if num_tensors > _MOST_TENSORS or num_values > _MOST_VALUES:
            raise BadFile(f"it has {num_tensors} tensors and {num_values} values, more than any model")
        yield gguf, num_tensors, num_values


def _read_file(path: Path) -> _FileHead:
    with _opened(path) as (gguf, num_tensors, num_values):
        values: dict[str, Any] = {}
        long_values: dict[str, int] = {}
        for _ in range(num_values):
            key = gguf.name()
            if key in values:
                raise BadFile(f"it has {key[:100]!r} twice")
            place = gguf.place
            values[key] = gguf.value()
            if values[key] is None and key.startswith(_TOKENIZER):
                long_values[key] = place
        tensors = [_tensor(gguf) for _ in range(num_tensors)]
        alignment = values.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            raise BadFile(f"its {_ALIGNMENT} is {alignment}, but must be a power of two up to {2**16}")
        num_bytes = gguf.left_behind(alignment)
        start = gguf.size - num_bytes
        _check_places(tensors, num_bytes, alignment, start)
    moved = [tensor._replace(begin=start + tensor.begin, end=start + tensor.end) for tensor in tensors]
    return _FileHead(values, long_values, moved)


def _tensor(gguf: _Gguf) -> GgufTensor:
    """Read a tensor's entry in the head. Its offset counts from the first byte after the head."""
    name = gguf.name()
    num_dimensions = gguf.number("I")
    if num_dimensions > 8:
        raise BadFile(f"its tensor {name[:100]!r} has {num_dimensions} dimensions")
    shape = [gguf.number("Q") for _ in range(num_dimensions)]
    kind = gguf.number("I")
    begin = gguf.number("Q")
    if kind not in _BLOCKS:
        raise BadFile(f"its tensor {name[:100]!r} has the unknown type {kind}")
    together, block_bytes = _BLOCKS[kind]
    row = shape[0] if shape else 1  # A tensor without dimensions is a single number.
    if row % together:
        raise BadFile(f"its tensor {name[:100]!r} has rows of {row} numbers, which are no blocks of {together}")
    end = begin + math.prod(shape) // together * block_bytes
    return GgufTensor(begin, end, name, kind, tuple(reversed(shape)))


def _check_places(tensors: list[GgufTensor], num_bytes: int, alignment: int, start: int) -> None:
    """Raise BadFile if tensors overlap, or lie outside the data, which begin at `start` in a file of `num_bytes`."""
    end = 0
    names = set()
    for tensor in sorted(tensors):
        shown = repr(tensor.name[:100])
        if tensor.name in names:
            raise BadFile(f"it has the tensor {shown} twice")
        names.add(tensor.name)
        if tensor.begin % alignment:
            raise BadFile(f"its tensor {shown} begins at {tensor.begin}, which is no multiple of {alignment}")
        if tensor.begin < end:
            raise BadFile(f"its tensor {shown} overlaps another one")
        end = tensor.end
        if end > num_bytes:
            needed = start + max(each.end for each in tensors)
            raise BadFile(
                f"its tensor {shown} ends after the file, which has {start + num_bytes:,} bytes and needs {needed:,}: "
                "it is cut, as by a download that was interrupted, or lies about its sizes"
            )
