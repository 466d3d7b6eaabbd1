"""Reads the tensors of a decoder from a GGUF file and undoes the changes of llama.cpp's conversion.

Matrices stay in the file's blocks; their rows may be reordered. Weights of norms and speeds of states need no change:
the file already has them in the form that a step needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from oaiserve.checkpoints.gguf import GgufHead, GgufTensor, architecture
from oaiserve.engine.decoder.blocks import FORMATS, Blocks, one_behind_the_other
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.reader import Tensors
from oaiserve.engine.decoder.settings import Settings
from oaiserve.engine.decoder.sources.gguf.architecture import MakeOrder, Order
from oaiserve.engine.decoder.sources.gguf.architectures import ARCHITECTURES
from oaiserve.engine.decoder.sources.gguf.file import GgufFile
from oaiserve.engine.decoder.sources.gguf.names import GGUF
from oaiserve.engine.decoder.sources.names import Names, names_of, split_path

# Tensors whose number of dimensions differs in the file: vectors, and the weights of convolutions.
_VECTORS = ("choice_bias", "mixer.A_log", "mixer.D", "mixer.norm")
_CONVOLUTION = "mixer.conv.weight"


class GgufTensors(Tensors):
    """Reads the tensors of a decoder, and records which were read."""

    has_norms_as_computed = True
    bias_dtype = torch.float32

    def __init__(self, head: GgufHead, names: Names, settings: Settings, dtype: torch.dtype) -> None:
        """`names` are the family's names on the hub, which adapters use for modules.

        `dtype` applies to matrices that are not in blocks.
        """
        self.dtype = dtype
        self.names = names
        self._settings = settings
        values = head.values
        self._architecture = ARCHITECTURES[architecture(values) or ""]
        self._names_in_file = {**GGUF, **self._architecture.names}
        self._file = GgufFile(head)
        self._tensors = self._file.tensors
        for name in self._architecture.unused:
            self._tensors.pop(name, None)
        # Layers after the model's own predict further tokens.
        num_layers = settings["num_hidden_layers"]
        num_further = values.get(f"{self._architecture.name}.nextn_predict_layers") or 0
        further = tuple(f"blk.{num_layers + number}." for number in range(num_further))
        self._unread = {name for name in self._tensors if not name.startswith(further)}

    def has(self, path: str) -> bool:
        return bool(self._find(path))

    def matrix(self, path: str) -> Tensor | Blocks:
        tensors = self._take(path)
        role = _role(path)
        is_made = role in self._architecture.make and len(tensors) > 1
        if is_made or len(tensors[0].shape) != 2 or tensors[0].kind not in FORMATS:
            expanded = self._expanded(path).to(self.dtype)
            if expanded.dim() > 1:
                return expanded
            return expanded[None]
        blocks = one_behind_the_other([self._file.blocks(tensor) for tensor in tensors])
        if (rows := self._order(self._architecture.rows, role)) is not None:
            blocks = blocks[rows]
        if (columns := self._order(self._architecture.columns, role)) is not None:
            blocks = blocks.with_columns(np.argsort(columns))
        return blocks

    def experts(self, path: str) -> list[Tensor | Blocks]:
        """Return the matrix [n, k] of each expert. The file has one tensor for all experts."""
        (tensor,) = self._take(path)
        if len(tensor.shape) != 3:
            raise NotKnown(f"its tensor '{tensor.name[:100]}' is not of several experts")
        if tensor.kind not in FORMATS:
            return list(self._expanded(path).to(self.dtype))
        experts, rows, _ = tensor.shape
        num_bytes = (tensor.end - tensor.begin) // experts
        begins = [tensor.begin + number * num_bytes for number in range(experts)]
        return [
            self._file.blocks(tensor._replace(begin=begin, end=begin + num_bytes, shape=(rows, tensor.shape[2])))
            for begin in begins
        ]

    def leave_out(self, path: str) -> None:
        self._unread -= {tensor.name for tensor in self._find(path)}

    def unread(self) -> list[str]:
        return sorted(self._unread)

    def _take(self, path: str) -> list[GgufTensor]:
        tensors = self._found(path)
        self._unread -= {tensor.name for tensor in tensors}
        return tensors

    def _found(self, path: str) -> list[GgufTensor]:
        tensors = self._find(path)
        if not tensors:
            raise NotKnown(f"its file has no tensor for '{path}'")
        return tensors

    def _find(self, path: str) -> list[GgufTensor]:
        """Return the tensors whose rows make up a path's matrix, or an empty list if any of them is missing."""
        module = path
        last = ""
        for suffix in (".weight", ".bias"):
            if path.endswith(suffix):
                module = path.removesuffix(suffix)
                last = suffix
        role = _role(path)
        for parts in self._architecture.joined.get(role, ()):
            layer = module.split(".")[1]
            names = [f"blk.{layer}.{part}{last}" for part in parts]
            stored = [self._tensors[name] for name in names if name in self._tensors]
            is_one = role in self._architecture.make or len({(one.kind, one.shard) for one in stored}) == 1
            if len(stored) == len(parts) and is_one:
                return stored
        for name in names_of(module, self._names_in_file):
            if (tensor := self._tensors.get(f"{name}{last}")) is not None:
                return [tensor]
        return []

    def _order(self, orders: Mapping[str, MakeOrder], role: str) -> Order | None:
        make = orders.get(role)
        if make is None:
            return None
        return make(self._settings)

    def stored(self, path: str) -> Tensor:
        self._take(path)
        tensor = self._expanded(path)
        return tensor.reshape(_shape_on_hub(path, tuple(tensor.shape)))

    def _expanded(self, path: str) -> Tensor:
        """Return a tensor with the hub's order of rows, in the shape that the file has."""
        tensors = self._found(path)
        role = _role(path)
        parts = [self._file.expanded(tensor) for tensor in tensors]
        if len(parts) > 1 and role in self._architecture.make:
            return self._architecture.make[role]([part.float() for part in parts])
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if (rows := self._order(self._architecture.rows, role)) is not None:
            whole = whole[torch.from_numpy(rows)]
        if (columns := self._order(self._architecture.columns, role)) is not None and whole.dim() > 1:
            whole = whole[:, torch.from_numpy(columns)]
        return whole


def _role(path: str) -> str:
    role = split_path(path)[0].removeprefix("layers.{}.")
    return role.removesuffix(".weight").removesuffix(".bias")


def _shape_on_hub(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if _role(path) in _VECTORS:
        return (math.prod(shape),)
    if path.endswith(_CONVOLUTION) and len(shape) == 2:
        channels, taps = shape
        return channels, 1, taps
    return shape
