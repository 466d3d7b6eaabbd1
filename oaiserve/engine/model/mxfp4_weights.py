"""The tensors of a checkpoint in MXFP4, as gpt-oss has them, under the names of transformers' model.

The weights of experts are in blocks of 32 numbers of four bits, with a scale for each block. Codes and scales are
tensors of their own. All other tensors are as in any other checkpoint.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oaiserve.engine.model.cpu.blocks import FORMATS, MXFP4, Blocks, ExpertBlocks
from oaiserve.engine.model.gguf_weights import NotKept
from oaiserve.safetensors_header import read_header

_CODES, _SCALES = "_blocks", "_scales"
_DTYPES = {"U8": torch.uint8, "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class _Place(NamedTuple):
    """Where a tensor is."""

    file: mmap.mmap
    begin: int
    dtype: str
    shape: tuple[int, ...]


class Mxfp4Weights:
    """The weights of mapped safetensors files: those of experts in blocks, and all other tensors as they are."""

    rope_factors: Tensor | None = None

    def __init__(self, folder: Path) -> None:
        """Map the files of a folder. Raises BadFile, and NotKept for tensors that are not known."""
        self._places: dict[str, _Place] = {}
        for path in sorted(folder.glob("*.safetensors")):
            header, start = read_header(path)
            with path.open("rb") as file:
                # The map is private, because torch warns of memory that it must not write to.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            for name, found in header.items():
                begin = start + found["data_offsets"][0]
                self._places[name] = _Place(mapped, begin, found["dtype"], tuple(found["shape"]))
        self._experts = {name.removesuffix(_CODES) for name in self._places if name.endswith(_CODES)}
        for name in self._experts:
            codes, scales = self._places[f"{name}{_CODES}"], self._places.get(f"{name}{_SCALES}")
            if scales is None or codes.shape != (*scales.shape, 16) or {codes.dtype, scales.dtype} != {"U8"}:
                raise NotKept(f"its '{name}' is no MXFP4")
        if not self._experts:
            raise NotKept("it has no weights in MXFP4")

    def names(self) -> set[str]:
        of_experts = {f"{name}{part}" for name in self._experts for part in (_CODES, _SCALES)}
        return self._experts | (self._places.keys() - of_experts)

    def formats(self) -> dict[str, int]:
        """Return how many matrices there are of each format."""
        found = {FORMATS[MXFP4].name: sum(self.shape(name)[0] for name in self._experts)}
        for name in self.names() - self._experts:
            if len(self.shape(name)) == 2 and not name.endswith("_bias"):
                found["not quantized"] = found.get("not quantized", 0) + 1
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of the model, whose experts have their columns before their rows."""
        if name not in self._experts:
            return self._places[name].shape
        experts, rows, blocks = self._places[f"{name}{_SCALES}"].shape
        return experts, blocks * FORMATS[MXFP4].weights, rows

    def blocks(self, name: str) -> ExpertBlocks | None:
        """Return the matrices of each expert in blocks, or None for a tensor that has none.

        The rows of a gate and of an up projection are in turns.
        """
        if name not in self._experts:
            return None
        parts = 2 if name.endswith("gate_up_proj") else 1
        return [tuple(matrix[part::parts] for part in range(parts)) for matrix in self._matrices(name)]

    def tensor(self, name: str) -> Tensor:
        """Return a tensor expanded, as the model's code has it."""
        if name not in self._experts:
            return self._read(name)
        return torch.stack([matrix.expand().T for matrix in self._matrices(name)])

    def _matrices(self, name: str) -> list[Blocks]:
        """Return the matrix of each expert."""
        place = self._places[f"{name}{_CODES}"]
        found: list[Blocks] = []
        for codes, scales in zip(*(self._read(f"{name}{part}").numpy() for part in (_CODES, _SCALES)), strict=True):
            offset, rows = place.begin + len(found) * codes.nbytes, np.arange(len(scales))
            found.append(Blocks(codes.reshape(len(scales), -1), MXFP4, rows, place.file, offset, scales))
        return found

    def _read(self, name: str) -> Tensor:
        place = self._places[name]
        if place.dtype not in _DTYPES:
            raise NotKept(f"its tensor '{name[:100]}' is of type {place.dtype}")
        dtype = _DTYPES[place.dtype]
        if place.begin % dtype.itemsize:
            raise NotKept(f"its tensor '{name[:100]}' begins between two numbers")
        count = math.prod(place.shape)
        return torch.frombuffer(place.file, dtype=dtype, count=count, offset=place.begin).view(place.shape)
