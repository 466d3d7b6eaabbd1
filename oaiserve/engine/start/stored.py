"""A description of a decoder as JSON and bytes, whose weights stay in the model's files.

Tensors that are in a file as they are computed with, and matrices in blocks, are stored as their places in it; copies
of rows as the place of their matrix, and their order. All others, such as norms in float32, are stored themselves.
"""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.decoder import description
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import Matrix
from oaiserve.engine.decoder.sources.wrapped_names import text_name
from oaiserve.engine.decoder.spec import KVShape, LayerStateShapes, ModelSpec, StateShape
from oaiserve.engine.model.checkpoints.weights import PlaceInFile
from oaiserve.engine.start.check import Checked, Part
from oaiserve.files.safetensors_header import read_header

# Values that JSON does not have, by the names of their types.
_SIMPLE: dict[str, Callable[[Any], Any]] = {
    "items": dict,
    "tuple": tuple,
    "frozenset": frozenset,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
}
# A model that needs more than this beside its files is not stored: its weights would be on the disk twice.
MOST_BYTES = 2**28
_ALIGNMENT = 64
_BEGINNING_BYTES = 64  # by which tensors of a file are told apart, before all of their bytes are compared
_OF_SPECS = (Checked, KVShape, LayerStateShapes, ModelSpec, Part, StateShape)
_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (*vars(description).values(), *_OF_SPECS) if isinstance(kind, type)
}
_SAFETENSORS_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float32, torch.int32)}

_Beginning = tuple[torch.dtype, tuple[int, ...], bytes]


class TooLarge(Exception):
    """Too much of the model is not in its files as it is computed with."""


class _Weights(NamedTuple):
    """A parameter of the model that is in a file as it is in memory."""

    address: int
    end: int
    file: str
    offset: int


class StoredTensors:
    """Collects tensors, and gives each a place: in a file of the model, or among the bytes `content`."""

    def __init__(
        self, folder: Path, parameters: Iterable[tuple[str, Tensor]], in_files: Mapping[str, PlaceInFile] | None = None
    ) -> None:
        """Prepare to place the tensors of a model whose parameters are `in_files`, or in the folder's safetensors."""
        self.content = bytearray()
        if in_files is None:
            in_files = _tensors_in(folder)
        self._files = {name: torch.from_file(str(folder / name), size=(folder / name).stat().st_size, dtype=torch.uint8)
                       for name in {place[0] for place in in_files.values()}}  # fmt: skip
        # The places of tensors by how they begin, because those of a file may have other names, or be a part each of
        # what transformers puts together.
        self._by_beginning: dict[_Beginning, list[tuple[str, int]]] = {}
        for file, offset, dtype, shape in in_files.values():
            length = min(math.prod(shape) * dtype.itemsize, _BEGINNING_BYTES)
            begins = bytes(self._files[file][offset : offset + length].numpy())
            self._by_beginning.setdefault((dtype, tuple(shape), begins), []).append((file, offset))
        found = []
        for name, parameter in parameters:
            if not parameter.is_meta and parameter.is_contiguous():
                address, own = parameter.data_ptr(), in_files.get(name)
                if own is not None and own[2:] == (parameter.dtype, list(parameter.shape)):
                    found.append(_Weights(address, address + parameter.nbytes, own[0], own[1]))
                elif (place := self._find(parameter)) is not None:
                    found.append(_Weights(address, address + parameter.nbytes, *place))
        self._weights = sorted(found)
        self._places: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets an address of these

    def place(self, tensor: Tensor) -> dict[str, Any]:
        """Return the place of a tensor, as `read_tensor` takes it. Raises TooLarge."""
        tensor = tensor.contiguous()
        key = (tensor.data_ptr(), tensor.shape, tensor.dtype)
        if key not in self._places:
            self._kept.append(tensor)
            file, offset = self._place_in_file(tensor) or self._find(tensor) or (None, self._append(tensor))
            place: dict[str, Any] = {"file": file, "offset": offset}
            place |= {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            self._places[key] = place
        return self._places[key]

    def place_blocks(self, blocks: Blocks) -> dict[str, Any]:
        """Return the place of a matrix in blocks, as `read_blocks` takes it. Raises TooLarge."""
        first, n = int(blocks.rows[0]), len(blocks)
        rows: Any = [first, first + n]
        if not np.array_equal(blocks.rows, np.arange(*rows)):
            rows = self.place(torch.from_numpy(blocks.rows.astype(np.int32)))
        place = {"offset": blocks.offset, "shape": list(blocks.data.shape), "kind": blocks.kind, "rows": rows}
        if blocks.columns is not None:
            place["columns"] = self.place(torch.from_numpy(blocks.columns))
        if blocks.part is not None:
            place["part"] = blocks.part
        return place | {"step": blocks.data.strides[0]}

    def _find(self, tensor: Tensor) -> tuple[str, int] | None:
        """Return the place in a file of a tensor with the same bytes, whatever its name."""
        content = tensor.detach().flatten().view(torch.uint8)
        key = (tensor.dtype, tuple(tensor.shape), bytes(content[:_BEGINNING_BYTES].numpy()))
        for file, offset in self._by_beginning.get(key, []):
            if torch.equal(self._files[file][offset : offset + tensor.nbytes], content):
                return file, offset
        return None

    def _place_in_file(self, tensor: Tensor) -> tuple[str, int] | None:
        index = bisect_right(self._weights, tensor.data_ptr(), key=lambda weights: weights.address) - 1
        if index < 0 or tensor.data_ptr() + tensor.nbytes > self._weights[index].end:
            return None
        weights = self._weights[index]
        offset = weights.offset + tensor.data_ptr() - weights.address
        if offset % tensor.dtype.itemsize:
            return None
        in_file = self._files[weights.file][offset : offset + tensor.nbytes]
        if not torch.equal(in_file, tensor.flatten().view(torch.uint8)):
            return None
        return weights.file, offset

    def _append(self, tensor: Tensor) -> int:
        if len(self.content) + tensor.nbytes > MOST_BYTES:
            raise TooLarge("its files have the weights in another form than it computes with")
        self.content += bytes(-len(self.content) % _ALIGNMENT)
        offset = len(self.content)
        self.content += tensor.flatten().view(torch.uint8).numpy().tobytes()
        return offset


def to_json(part: Any, tensors: StoredTensors) -> Any:
    """Return a description as JSON, in which each part that occurs several times is only once. Raises TooLarge."""
    numbers: dict[int, int] = {}

    def convert(part: Any) -> Any:
        if isinstance(part, Tensor):
            return {"tensor": tensors.place(part)}
        if isinstance(part, list):
            return [convert(item) for item in part]
        if isinstance(part, dict):
            return {"items": [convert(list(item)) for item in part.items()]}
        if isinstance(part, tuple | frozenset):
            return {type(part).__name__: [convert(item) for item in part]}
        if isinstance(part, torch.dtype | torch.device):
            return {type(part).__name__: str(part).removeprefix("torch.")}
        if not is_dataclass(part):
            return part
        if id(part) in numbers:
            return {"same": numbers[id(part)]}
        numbers[id(part)] = len(numbers)
        if isinstance(part, Blocks):
            return {"is": "Blocks"} | tensors.place_blocks(part)
        if isinstance(part, Matrix) and part.copy_of is not None:
            part = replace(part, weight=None)  # type: ignore[arg-type]  # it is copied again
        return {"is": type(part).__name__} | {field.name: convert(getattr(part, field.name)) for field in fields(part)}

    return convert(part)


class StoredFiles:
    """Reads stored tensors, from the model's files and from the bytes of a record that begin at `start`."""

    def __init__(self, folder: Path, content: bytearray, start: int, blocks_file: str = "") -> None:
        """Read from a folder. Matrices in blocks whose place names no part of the model are in `blocks_file`, which is
        there, or has a path of its own."""
        self._folder, self._content, self._start, self._blocks_file = folder, content, start, blocks_file
        self._maps: dict[str, mmap.mmap] = {}

    def read_tensor(self, place: Mapping[str, Any]) -> Tensor:
        """Return the tensor at a place. Raises ValueError if it is outside of the file."""
        dtype, shape, file = _DTYPES[place["dtype"]], place["shape"], place["file"]
        content, start = (self._content, self._start) if file is None else (self._map(file), 0)
        return torch.frombuffer(content, dtype=dtype, count=math.prod(shape), offset=start + place["offset"]).view(
            shape
        )

    def read_blocks(self, place: Mapping[str, Any]) -> Blocks:
        """Return the matrix in blocks at a place. Raises ValueError if it is outside of the file."""
        part, shape, rows = place.get("part"), place["shape"], place["rows"]
        mapped = self._map(part or self._blocks_file)
        num_bytes = (shape[0] - 1) * place["step"] + shape[1]
        data = np.frombuffer(mapped, np.uint8, num_bytes, place["offset"])
        data = np.lib.stride_tricks.as_strided(data, shape, (place["step"], 1))
        order = np.arange(*rows) if isinstance(rows, list) else self.read_tensor(rows).numpy().astype(np.int64)
        columns = self.read_tensor(place["columns"]).numpy() if "columns" in place else None
        return Blocks(data, place["kind"], order, mapped, place["offset"], columns=columns, part=part)

    def give_back(self) -> None:
        """Have the system drop the pages that were read. Those that are needed again are read again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, name: str) -> mmap.mmap:
        if name not in self._maps:
            with (self._folder / name).open("rb") as file:
                # The map is private, because torch warns of memory that it must not write to.
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[name].madvise(mmap.MADV_WILLNEED)
        return self._maps[name]


def from_json(stored: Any, files: StoredFiles) -> Any:
    """Read the argument of `to_json` back. Raises KeyError, TypeError or ValueError for anything else."""
    parts: list[Any] = []

    def convert(stored: Any) -> Any:
        if isinstance(stored, list):
            return [convert(item) for item in stored]
        if not isinstance(stored, dict):
            return stored
        if (kind := next(iter(stored), "")) in _SIMPLE:
            return _SIMPLE[kind](convert(stored[kind]))
        if "tensor" in stored:
            return files.read_tensor(stored["tensor"])
        if "same" in stored:
            return parts[stored["same"]]
        number = len(parts)
        parts.append(None)
        if stored["is"] == "Blocks":
            parts[number] = files.read_blocks(stored)
            return parts[number]
        values = {name: convert(value) for name, value in stored.items() if name != "is"}
        if (copy_of := values.get("copy_of")) is not None:
            values["weight"] = copy_of.copied()
        parts[number] = _CLASSES[stored["is"]](**values)
        return parts[number]

    return convert(stored)


def _tensors_in(folder: Path) -> dict[str, PlaceInFile]:
    """Return the place of each tensor in the safetensors files of a folder, by its text name."""
    found: dict[str, PlaceInFile] = {}
    for path in sorted(folder.glob("*.safetensors")):
        header, start = read_header(path)
        for name, tensor in header.items():
            if (dtype := _SAFETENSORS_DTYPES.get(tensor["dtype"])) is not None:
                found[text_name(name)] = (path.name, start + tensor["data_offsets"][0], dtype, tensor["shape"])
    return found
