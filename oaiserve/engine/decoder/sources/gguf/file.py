"""The tensors of a mapped GGUF file, in blocks or expanded."""

from __future__ import annotations

import math
import mmap
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oaiserve.checkpoints.gguf import GgufHead, GgufTensor
from oaiserve.engine.decoder.blocks import Blocks, expand
from oaiserve.engine.decoder.description import NotKnown

_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # keyed by format; other formats have no dtype
_MAPPED_BYTES = 2**20


class _Part(NamedTuple):
    path: Path
    map: mmap.mmap
    data: NDArray[np.uint8]


class GgufFile:
    """The tensors of a file, or of all parts of a model, as they are stored."""

    def __init__(self, head: GgufHead) -> None:
        self.tensors = dict(head.tensors)
        self._paths = head.paths

    @cached_property
    def _parts(self) -> list[_Part]:
        return [_mapped(shard) for shard in self._paths]

    def blocks(self, tensor: GgufTensor) -> Blocks:
        path, mapped, data = self._parts[tensor.shard]
        rows = data[tensor.begin : tensor.end].reshape(tensor.shape[0], -1)
        part = path.resolve().name if len(self._parts) > 1 else None
        return Blocks(rows, tensor.kind, np.arange(tensor.shape[0]), mapped, tensor.begin, part=part)

    def expanded(self, tensor: GgufTensor) -> Tensor:
        """Return a tensor in a dtype of the file or in float32. Raises NotKnown for an unknown format."""
        path, _, data = self._parts[tensor.shard]
        if (dtype := _DTYPES.get(tensor.kind)) is not None:
            return _floats(path, data, tensor, dtype).view(dtype).view(tensor.shape)
        try:
            rows = data[tensor.begin : tensor.end].reshape(math.prod(tensor.shape[:-1]), -1)
            return expand(rows, tensor.kind).view(tensor.shape)
        except NotImplementedError as error:
            raise NotKnown(f"its tensor '{tensor.name[:100]}' has a format that cannot be expanded") from error


def _mapped(path: Path) -> _Part:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return _Part(path, mapped, np.frombuffer(mapped, np.uint8))


def _floats(path: Path, data: NDArray[np.uint8], tensor: GgufTensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes of a tensor. A large tensor shares the file's memory."""
    num_bytes = tensor.end - tensor.begin
    if num_bytes < _MAPPED_BYTES or tensor.begin % dtype.itemsize:
        return torch.from_numpy(data[tensor.begin : tensor.end].copy())
    # The map is private because torch warns about read-only memory. It covers only this tensor, because the system may
    # refuse a private map that is larger than its memory.
    start = tensor.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), tensor.end - start, access=mmap.ACCESS_COPY, offset=start)
    return torch.frombuffer(mapped, dtype=torch.uint8, count=num_bytes, offset=tensor.begin - start)
