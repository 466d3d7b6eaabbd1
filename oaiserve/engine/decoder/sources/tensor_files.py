"""Maps the safetensors files of a folder, and provides their tensors by name."""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.sources.wrapped_names import own_name
from oaiserve.errors import StartupError

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip


class _Place(NamedTuple):
    path: Path
    begin: int
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """Reads tensors from mapped files after checking the files' headers."""

    def __init__(self, checkpoint: Checkpoint, *, of_wrapper: bool = False) -> None:
        """Read the headers. Raises BadFile for a wrong header.

        With `of_wrapper`, only the tensors of a wrapper's text model are included.
        """
        self._places: dict[str, _Place] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for path in checkpoint.weight_files:
            header, start = checkpoint.header(path)
            for name, tensor in header.items():
                own = own_name(name) if of_wrapper else name
                if own is None:
                    continue
                begin = start + tensor["data_offsets"][0]
                self._places[own] = _Place(path, begin, tensor["dtype"], tuple(tensor["shape"]))

    def names(self) -> set[str]:
        return set(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def has_blocks(self) -> bool:
        """Return whether the files have matrices in quantized blocks, which torch has no dtypes for."""
        return False

    def zero_biases(self) -> set[str]:
        """Return the names of biases that are all zeros and exist only because the format requires them."""
        return set()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape

    def kind(self, name: str) -> str:
        """Return the type of a tensor's numbers, as safetensors names it."""
        return self._places[name].dtype

    def place(self, name: str) -> tuple[mmap.mmap, int]:
        """Return the mapped file of a tensor, and its offset in that file."""
        return self._map(self._places[name].path), self._places[name].begin

    def refusal(self, name: str, reason: str) -> StartupError:
        return StartupError(f"'{self._places[name].path}' cannot be used: its tensor {name[:100]!r} {reason}.")

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that shares the file's memory. Raises StartupError for a type that torch doesn't have."""
        path, begin, kind, shape = self._places[name]
        dtype: Any = _DTYPES.get(kind)
        if dtype is None:
            raise self.refusal(name, f"has numbers of the type {kind}, which are not read")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        data = torch.frombuffer(
            self._map(path), dtype=torch.uint8, count=math.prod(shape) * dtype.itemsize, offset=begin
        )
        # The header before the data may have any length, so the data may be unaligned.
        return (data.clone() if begin % dtype.itemsize else data).view(dtype).view(shape)

    def blocks(self, name: str) -> Blocks | None:
        """Return a matrix in blocks, or None for a tensor that is used as it is."""
        return None

    def expert_blocks(self, name: str) -> list[Blocks] | None:
        """Return the matrix [n, k] of each expert in blocks, or None for any other tensor."""
        return None

    def give_back(self) -> None:
        """Have the system drop the read pages, which are read again when needed."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # The map is private because torch warns about read-only memory.
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]
