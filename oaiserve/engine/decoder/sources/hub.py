"""The tensors of safetensors files, under a family's names on the hub."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from oaiserve.engine.decoder.blocks import Blocks
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.reader import Tensors
from oaiserve.engine.decoder.sources.names import Names, names_of
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles

# Tensors that models don't read: masks, frequencies, and layers that predict further tokens.
_UNUSED = re.compile(
    r"(\.attn\.(bias|masked_bias)|\.attention\.(bias|masked_bias)|rotary_emb\.inv_freq)$|^(model\.)?mtp[._]"
)


class HubTensors(Tensors):
    """Reads the tensors of a decoder, and records which were read."""

    has_norms_as_computed = False  # Where a family stores norm weights minus 1, so do these files.

    def __init__(
        self,
        files: TensorFiles,
        names: Names,
        dtype: torch.dtype,
        *,
        is_transposed: bool = False,
        has_transposed_experts: bool = False,
        keeps_dtype: bool = False,
    ) -> None:
        """`dtype` applies to matrices.

        With `keeps_dtype`, they keep the files' dtype and share the files' memory, until an executor places them one by
        one.

        With `is_transposed`, matrices of layers are [k, n] in the files; with `has_transposed_experts`, tensors of all
        experts are [experts, k, n].
        """
        self.dtype = dtype
        self.bias_dtype = torch.float32 if files.has_blocks() else dtype
        self._files = files
        self._in_files = files.names() - files.zero_biases()
        self.names = names
        self._is_transposed = is_transposed
        self._has_transposed_experts = has_transposed_experts
        self._keeps_dtype = keeps_dtype
        self._read: set[str] = set()

    def has(self, path: str) -> bool:
        return self._find(path) is not None

    def matrix(self, path: str) -> Tensor | Blocks:
        """Return a matrix [n, k] in blocks, or a tensor, which shares the file's memory unless it was converted.

        Files that are quantized at loading are quantized at each call.
        """
        name = self._taken(path)
        blocks = self._files.blocks(name)
        if blocks is not None:
            return blocks
        matrix = self._converted(self._files.tensor(name))
        return matrix.T.contiguous() if self._is_transposed and path.startswith("layers.") else matrix

    def experts(self, path: str) -> list[Tensor | Blocks]:
        """Return the matrix [n, k] of each expert. The files have one tensor for all experts, or one for each."""
        if self.has(path):
            name = self._taken(path)
            if (blocks := self._files.expert_blocks(name)) is not None:
                return list(blocks)
            stacked = self._converted(self._files.tensor(name))
            return list(stacked.mT if self._has_transposed_experts or self._is_turned(path, stacked) else stacked)
        place, _, role = path.partition(".experts.")
        matrices: list[Tensor | Blocks] = [self.matrix(f"{place}.experts.0.{role}")]
        while self.has(path_of_next := f"{place}.experts.{len(matrices)}.{role}"):
            matrices.append(self.matrix(path_of_next))
        return matrices

    def _converted(self, matrix: Tensor) -> Tensor:
        return matrix if self._keeps_dtype and matrix.is_floating_point() else matrix.to(self.dtype)

    def _is_turned(self, path: str, stacked: Tensor) -> bool:
        """Return whether a tensor of all experts is [experts, k, n], as in files of Qwen3-VL."""
        width = self._files.shape(self._found("embedding.weight"))[1]
        _, rows, columns = stacked.shape
        if path.endswith(".down.weight"):
            return columns == width != rows
        return rows == width != columns

    def leave_out(self, path: str) -> None:
        tensor = self._find(path)
        if tensor is not None:
            self._read.add(tensor)
        for name in names_of(path, self.names):
            starts = (f"{name}.", f"{name.partition('.')[2]}.")
            self._read.update(one for one in self._files.names() if one.startswith(starts))

    def unread(self) -> list[str]:
        return sorted(name for name in self._in_files - self._read if not _UNUSED.search(name))

    def give_back(self) -> None:
        """Have the system drop the pages of the files, which are read again when needed."""
        self._files.give_back()

    def stored(self, path: str) -> Tensor:
        return self._files.tensor(self._taken(path))

    def _taken(self, path: str) -> str:
        name = self._found(path)
        self._read.add(name)
        return name

    def _found(self, path: str) -> str:
        name = self._find(path)
        if name is None:
            known = names_of(path.removesuffix(".weight"), self.names)
            raise NotKnown(f"its files have no tensor '{known[0] if known else path}'")
        return name

    def _find(self, path: str) -> str | None:
        """Return the name of a tensor in the files, which may leave out the first part of a module's name."""
        module = path
        endings: tuple[str, ...] = ("",)
        for suffix, of_stacked in ((".weight", ""), (".bias", "_bias")):  # endings of tensors of all experts
            if path.endswith(suffix):
                module = path.removesuffix(suffix)
                endings = (suffix, of_stacked)
        for name in names_of(module, self.names):
            for start in (name, name.partition(".")[2]):
                for ending in endings:
                    if f"{start}{ending}" in self._in_files:
                        return f"{start}{ending}"
        return None
