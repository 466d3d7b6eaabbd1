"""The matrices of a layer's experts on a GPU, as a checkpoint has them, or in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import MXFP4_TILE, PackedMatrix


@dataclass(frozen=True, slots=True)
class ExpertMatrices(PackedMatrix):
    """A matrix [n, columns] of each expert: all tensors have one more dimension in front."""

    bias: Tensor | None = None  # [experts, n]

    def of(self, expert: int) -> PackedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], zeros)


def mxfp4(blocks: Tensor, scales: Tensor, bias: Tensor | None) -> ExpertMatrices | None:
    """Return experts in MXFP4, or None if their columns are no multiples of 64.

    `blocks` uint8 [experts, n, groups, 16] have neighbours in a byte, and `scales` uint8 [experts, n, groups] are
    exponents of two, plus 127.
    """
    experts, n, groups, _ = blocks.shape
    if groups * 32 % MXFP4_TILE:
        return None
    codes = torch.empty(experts, n, groups * 16, dtype=torch.uint8)
    for expert in range(experts):  # one by one, since each takes a few times its size
        numbers = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).view(n, groups // 2, 2, 32)
        codes[expert] = (numbers[:, :, 0] | numbers[:, :, 1] << 4).flatten(1)
    return ExpertMatrices("mxfp4", codes, scales.mT.contiguous(), None, bias=bias)


def stacked(packed: Sequence[PackedMatrix | None]) -> ExpertMatrices | None:
    """Return the matrices of all experts, or None if these are stored in different ways, or one is not packed."""
    matrices = [one for one in packed if one is not None]
    if len(matrices) < len(packed):
        return None
    first = matrices[0]
    kinds = {(one.kind, one.shape, one.scales.shape, one.scales.dtype, one.zeros is None) for one in matrices}
    if len(kinds) > 1 or any(one.order is not None for one in matrices):
        return None
    codes = torch.stack([one.codes.view(torch.uint8) for one in matrices]).view(first.codes.dtype)
    zeros = (
        None if first.zeros is None else torch.stack([zeros for one in matrices if (zeros := one.zeros) is not None])
    )
    return ExpertMatrices(first.kind, codes, torch.stack([one.scales for one in matrices]), zeros)
