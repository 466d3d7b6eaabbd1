"""The matrices of a layer's experts on a GPU, as a checkpoint has them, or in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oaiserve.engine.model.gpu.device_matrices import PackedMatrix


@dataclass(frozen=True, slots=True)
class ExpertMatrices(PackedMatrix):
    """A matrix [n, columns] of each expert: all tensors have one more dimension in front."""

    bias: Tensor | None = None  # [experts, n]

    def of(self, expert: int) -> PackedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], zeros)


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
