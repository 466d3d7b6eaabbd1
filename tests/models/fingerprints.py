"""Writes the description of a model as text in which each difference shows, in few lines.

A line has a field and its value: floats as `repr` writes them, of a tensor the dtype, the shape and a hash of its
bytes, of blocks the format, the shape, their place in the file and a hash. What is None, False, 0 or the default of its
field is left out. A norm or a tensor that occurs again is written as the path of its first place. Layers, experts and
other parts that differ from an earlier one only in their numbers are said to be like it, with one hash of all theirs.
"""

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oaiserve.engine.decoder.blocks import FORMATS, Blocks
from oaiserve.engine.decoder.description import (
    AttentionParameters,
    ClampedGate,
    Convolution,
    Decoder,
    Matrix,
    Norm,
    RotaryTable,
)
from oaiserve.engine.decoder.spec import KVShape, LayerStateShapes, ModelSpec, StateShape

# Facts that serving needs besides a model's description.
_OF_MODEL = ("name", "dtype", "vocab_size", "max_model_len", "eos_token_ids", "kv_shapes", "state_shapes")
_IN_ONE_LINE = (
    *(AttentionParameters, ClampedGate, Convolution, KVShape, LayerStateShapes, Matrix, Norm, RotaryTable),
    *(StateShape, Blocks),
)
_DTYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "i32"}
_HASH = re.compile("[#@][0-9a-f]+")  # a hash of bytes, or their place in a file


def fingerprint(decoder: Decoder, spec: ModelSpec) -> str:
    """Return the description of a model as text."""
    text = _Text()
    return "".join(f"{line}\n" for name in _OF_MODEL for line in text.lines(name, name, getattr(spec, name))) + text_of(
        decoder
    )


def text_of(decoder: Decoder) -> str:
    """Return a description as text, without the other facts for serving."""
    text = _Text()
    lines: list[str] = []
    attentions = [layer.attention for layer in decoder.layers if layer.attention is not None]
    tables = [table for one in attentions for table in (one.rotary, one.query_factors) if table is not None]
    for number, table in enumerate({_identity(table): table for table in tables}.values()):
        lines += text.lines(f"table.{number}", f"table.{number}", table)
    for field in fields(decoder):
        value = getattr(decoder, field.name)
        if not _is_left_out(field, value):
            lines += text.lines(field.name, field.name, value)
    return "".join(f"{line}\n" for line in _folded(lines))


def _folded(lines: list[str]) -> Iterator[str]:
    """Write parts of layers that differ from an earlier one only in their hashes in one line, with a hash of these."""
    firsts: dict[str, str] = {}
    path: list[str] = []
    number = 0
    while number < len(lines):
        depth = _depth(lines[number])
        name = lines[number].split()[0]
        path[depth:] = [name]
        end = next((below for below in range(number + 1, len(lines)) if _depth(lines[below]) <= depth), len(lines))
        layer = path[0].removeprefix("layers.")
        text = "\n".join(lines[number:end]).replace(f".{layer}.", ".N.")
        place = ".".join(path)
        first = firsts.setdefault(_HASH.sub("#", text), place)
        if depth > 0 and end - number > 1 and first != place:
            yield f"{' ' * depth}{name} like {first} {_hash(''.join(_HASH.findall(text)).encode())}"
            number = end
        else:
            yield lines[number]
            number += 1


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def text_of_table(table: RotaryTable | torch.Tensor) -> str:
    """Return a table as it is written where it occurs first."""
    return _Text().value("", table)


class _Text:
    """The text of one description. It knows where each tensor, norm and table has been written first."""

    def __init__(self) -> None:
        self._places: dict[object, str] = {}

    def lines(self, name: str, path: str, part: Any) -> Iterator[str]:
        """Write a part under its name, and those of its own parts that take lines below it."""
        if isinstance(part, list):
            part = dict(enumerate(part))
        if isinstance(part, dict):
            yield from self._all(name, path, part)
        elif is_dataclass(part) and not isinstance(part, _IN_ONE_LINE):
            yield f"{name} {type(part).__name__}"
            for field in fields(part):
                value = getattr(part, field.name)
                if not _is_left_out(field, value):
                    yield from (f" {line}" for line in self.lines(field.name, f"{path}.{field.name}", value))
        else:
            yield f"{name} {self.value(path, part)}"

    def _all(self, name: str, path: str, parts: dict[int, Any]) -> Iterator[str]:
        """Write the first part of each kind, and then which others are like it, with one hash of all their hashes."""
        kinds: dict[str, tuple[list[str], list[int], list[str]]] = {}
        for number, part in parts.items():
            lines = list(self.lines("", f"{path}.{number}", part))
            text = "\n".join(lines)
            own_name = f".{number}." if name == "layers" else f".{name}.{number}."
            kind = _HASH.sub("#", text.replace(own_name, ".N."))
            _, numbers, hashes = kinds.setdefault(kind, (lines, [], []))
            numbers.append(number)
            if len(numbers) > 1:
                hashes += _HASH.findall(text)
        for (line, *below), (first, *others), hashes in kinds.values():
            yield f"{name}.{first}{line}"
            yield from below
            if others:
                digest = f" {_hash(''.join(hashes).encode())}" if hashes else ""
                yield f"{name}.{','.join(map(str, others))} like {first}{digest}"

    def value(self, path: str, part: Any) -> str:
        """Return a part in one line."""
        if isinstance(part, torch.Tensor | Blocks | Norm | RotaryTable):
            first = self._places.setdefault(_identity(part), path)
            if first != path:
                return f"is {first}"
        if isinstance(part, torch.Tensor):
            return f"{_DTYPES[part.dtype]}{_shape(part.shape)} {_of_array(part.contiguous().view(torch.uint8).numpy())}"
        if isinstance(part, Blocks):
            return _blocks(part)
        if not is_dataclass(part):
            return repr(sorted(part) if isinstance(part, frozenset) else part)
        results = []
        for field in fields(part):
            value = getattr(part, field.name)
            if not _is_left_out(field, value):
                results.append(f"{field.name}={self.value(f'{path}.{field.name}', value)}")
        if isinstance(part, RotaryTable):
            results.append(_angles(part))
        return f"({', '.join(results)})"


def _is_left_out(field: Field[Any], value: Any) -> bool:
    if field.default is MISSING or field.default is None:
        return value is None or (isinstance(value, int | float) and value == 0)
    return bool(value == field.default)


def _identity(part: torch.Tensor | Blocks | Norm | RotaryTable) -> object:
    if isinstance(part, torch.Tensor):
        return part.data_ptr(), part.shape, part.stride(), part.dtype
    if isinstance(part, Blocks):
        return part.data.ctypes.data, part.rows.tobytes(), part.kind
    return id(part)


def _angles(table: RotaryTable) -> str:
    """Return by how much the first and the last pair turn from a position to the next, and the length of all pairs."""
    cosines, sines = (part[1].tolist() for part in (table.cosines, table.sines))
    turns = [f"{math.atan2(sines[pair], cosines[pair]):.4g}" for pair in (0, -1)]
    return f"turns {turns[0]} to {turns[1]}, length {math.hypot(sines[0], cosines[0]):.4g}"


def _blocks(part: Blocks) -> str:
    rows = part.rows
    is_range = len(rows) > 0 and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows)))
    of_rows = f"from {rows[0]}" if is_range else _of_array(rows)
    columns = "" if part.columns is None else f" columns {_of_array(part.columns)}"
    scales = "" if part.scales is None else f" scales {_of_array(part.scales[rows])}"
    form = f"{FORMATS[part.kind].name}{_shape(part.shape)} @{part.offset} rows {of_rows}{columns}{scales}"
    return f"{form} {_of_array(part.data[rows])}"


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _of_array(values: NDArray[Any]) -> str:
    return _hash(np.ascontiguousarray(values).tobytes())


def _hash(data: bytes) -> str:
    return f"#{hashlib.sha256(data).hexdigest()[:6]}"
