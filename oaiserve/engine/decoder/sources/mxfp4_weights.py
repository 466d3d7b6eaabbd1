"""The tensors of a checkpoint in MXFP4, as gpt-oss has them, under the names of transformers' model.

The weights of experts are blocks of 32 four-bit numbers with one scale. Codes and scales are separate tensors. All
other tensors are stored as usual.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oaiserve.checkpoints.checkpoint import Checkpoint
from oaiserve.engine.decoder.blocks import FORMATS, MXFP4, Blocks
from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.tensor_files import TensorFiles

_CODES = "_blocks"
_SCALES = "_scales"
_OTHER_KINDS = ("BF16", "F16", "F32")  # types of tensors that are not quantized


class Mxfp4Weights(TensorFiles):
    """The weights of mapped safetensors files: experts in blocks, and all other tensors as they are."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Map the files of a folder. Raises BadFile, and NotKnown for unknown tensors."""
        super().__init__(checkpoint)
        self._experts = {name.removesuffix(_CODES) for name in self._places if name.endswith(_CODES)}
        for name in self._experts:
            codes = self._places[f"{name}{_CODES}"]
            scales = self._places.get(f"{name}{_SCALES}")
            if scales is None or codes.shape != (*scales.shape, 16) or {codes.dtype, scales.dtype} != {"U8"}:
                raise NotKnown(f"its '{name}' is no MXFP4")
        if not self._experts:
            raise NotKnown("it has no weights in MXFP4")
        for name in self.names() - self._experts:
            if self.kind(name) not in _OTHER_KINDS:
                raise NotKnown(f"its tensor '{name[:100]}' is of type {self.kind(name)}")

    def names(self) -> set[str]:
        of_experts = {f"{name}{part}" for name in self._experts for part in (_CODES, _SCALES)}
        return self._experts | (self._places.keys() - of_experts)

    def has_blocks(self) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter of the model, which stores experts as [columns, rows]."""
        if name not in self._experts:
            return super().shape(name)
        experts, rows, blocks = super().shape(f"{name}{_SCALES}")
        return experts, blocks * FORMATS[MXFP4].weights, rows

    def expert_blocks(self, name: str) -> list[Blocks] | None:
        if name in self._experts:
            return self._matrices(name)
        return None

    def tensor(self, name: str) -> Tensor:
        """Return an expanded tensor in the form that the model's code uses."""
        if name not in self._experts:
            return super().tensor(name)
        return torch.stack([matrix.expand().T for matrix in self._matrices(name)])

    def _matrices(self, name: str) -> list[Blocks]:
        """Return the matrix of each expert. Its codes are [rows, groups, 16], two in a byte."""
        file, begin = self.place(f"{name}{_CODES}")
        parts = (super(Mxfp4Weights, self).tensor(f"{name}{part}").numpy() for part in (_CODES, _SCALES))
        matrices: list[Blocks] = []
        for codes, scales in zip(*parts, strict=True):
            offset = begin + len(matrices) * codes.nbytes
            rows = np.arange(len(scales))
            matrices.append(Blocks(codes.reshape(len(scales), -1), MXFP4, rows, file, offset, scales))
        return matrices
