"""Reads the header of a safetensors file, and refuses one that contradicts the data after it. Stdlib only."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from oaiserve.checkpoints.bad_file import BadFile, refuse_other_content

_MOST_HEADER_BYTES = 10**8  # safetensors refuses longer ones
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


def read_header(path: Path, most_bytes: int = _MOST_HEADER_BYTES) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, keyed by the names of the tensors, and the offset of the data in the
    file.

    Raises BadFile if the header is longer than `most_bytes`, or if the data of the tensors don't fill the rest of the
    file without gaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _MOST_HEADER_BYTES):
            refuse_other_content(path)
            if size < 8 or length > _MOST_HEADER_BYTES:
                raise BadFile("it is cut, or no safetensors file")
            raise BadFile(f"it is cut, or no safetensors file: it has {size} bytes, and needs at least {length + 8}")
        if length > most_bytes:
            raise BadFile(f"its header has {length} bytes, and may have at most {most_bytes}")
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError) as error:
            raise BadFile("its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise BadFile("its header is not a JSON object")
    header.pop("__metadata__", None)
    end = 0
    for begin, next_end, name in sorted((*_data_range(name, tensor), name) for name, tensor in header.items()):
        if begin != end:
            if begin < end:
                problem = "overlaps another one"
            else:
                problem = "begins after bytes that belong to none"
            raise BadFile(f"its tensor {name[:100]!r} {problem}")
        end = next_end
    if 8 + length + end != size:
        raise BadFile(f"it has {size} bytes where its header says {8 + length + end}, so it is cut or damaged")
    return header, 8 + length


def _data_range(name: str, tensor: Any) -> tuple[int, int]:
    """Return the byte range of a tensor, relative to the end of the header. Raises BadFile unless it fits the tensor's
    shape."""
    shown = name[:100]
    described = tensor if isinstance(tensor, dict) else {}
    offsets, shape, dtype = (described.get(key) for key in ("data_offsets", "shape", "dtype"))
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFile(f"its header does not say where the tensor {shown!r} is")
    if not _are_sizes(shape):
        raise BadFile(f"its header does not say what shape the tensor {shown!r} has")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise BadFile(f"its tensor {shown!r} has the unknown type {str(dtype)[:100]!r}")
    begin, end = offsets
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise BadFile(f"its tensor {shown!r} has {end - begin} bytes, which are not the shape {shape} in {dtype}"[:300])
    return begin, end


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**63 for size in value)
