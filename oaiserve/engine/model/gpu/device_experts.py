"""Experts that stay on a GPU as a checkpoint has them: MXFP4, integers of 4 or 8 bits, or floats of 8 bits.

The module of a layer's experts keeps its place in transformers' model. Its outputs are computed in plain torch, expert
by expert, until `compute_by` sets kernels that multiply the rows of all experts in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import linear

from oaiserve.engine.decoder.description import ClampedGate
from oaiserve.engine.model.gpu.device_matrices import MXFP4_TILE, PackedMatrix
from oaiserve.engine.model.layer_operations import combination

# Hidden states [T, width], experts [T, top_k] and their weights [T, top_k] to the sum [T, width].
Compute = Callable[["PackedExperts", Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertMatrices(PackedMatrix):
    """A matrix [n, columns] of each expert: all tensors have one more dimension in front."""

    bias: Tensor | None = None  # [experts, n]

    def of(self, expert: int) -> PackedMatrix:
        zeros = None if self.zeros is None else self.zeros[expert]
        return PackedMatrix(self.kind, self.codes[expert], self.scales[expert], zeros)


class PackedExperts:
    """The experts of a layer, in the place of transformers' module, which knows how gate and up are combined."""

    def __init__(self, module: Any, gate_up: ExpertMatrices, down: ExpertMatrices) -> None:
        self.gate_up, self.down = gate_up, down
        self.combine: Callable[[Tensor], Tensor] = module._apply_gate
        self.is_interleaved = not module.is_concatenated  # gates and ups are in turns
        found = combination(module)
        # The name of the activation for activation(gate) * up, "clamped" for gpt-oss's way, or None for another one.
        self.activation: str | None = "clamped" if isinstance(found, ClampedGate) else found
        self.alpha, self.limit = (found.alpha, found.limit) if isinstance(found, ClampedGate) else (0.0, 0.0)
        self.compute: Compute = plain_experts

    @property
    def num_experts(self) -> int:
        return len(self.gate_up.codes)

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return self.compute(self, x, chosen, weights)


def keep_experts(module: Any, gate_up: ExpertMatrices, down: ExpertMatrices) -> None:
    """Let a module compute with these matrices, which move with it, and free its own."""
    packed = module.packed_experts = PackedExperts(module, gate_up, down)
    shapes = {name: module._parameters.pop(name).to("meta") for name in ("gate_up_proj", "down_proj")}

    def unread(device: torch.device) -> None:
        # Of the shape and the type that the weights would have, without memory: a description of the model reads it.
        for name, weights in shapes.items():
            setattr(module, name, torch.zeros(1, dtype=weights.dtype, device=device).expand(weights.shape))

    apply_to_parameters = module._apply

    def apply(function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        device = function(torch.empty(0)).device
        packed.gate_up, packed.down = packed.gate_up.to(device), packed.down.to(device)
        unread(device)
        return apply_to_parameters(function, recurse)

    unread(gate_up.codes.device)
    module._apply = apply
    module.forward = packed.__call__


def packed_experts(model: Module) -> list[PackedExperts]:
    return [found for module in model.modules() if (found := getattr(module, "packed_experts", None)) is not None]


def compute_by(model: Module, compute: Compute) -> None:
    """Let all packed experts of a model compute so."""
    for experts in packed_experts(model):
        experts.compute = compute


def plain_experts(experts: PackedExperts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts in plain torch. The host waits for the device, to see which rows each expert has."""
    out = torch.zeros_like(x)
    for expert in range(experts.num_experts):
        rows, places = torch.where(chosen == expert)
        if len(rows) == 0:
            continue
        product = x[rows]
        for matrices, then in ((experts.gate_up, experts.combine), (experts.down, None)):
            bias = None if matrices.bias is None else matrices.bias[expert].to(x.dtype)
            product = linear(product, matrices.of(expert).expand(x.dtype), bias)
            product = product if then is None else then(product)
        out.index_add_(0, rows, (product * weights[rows, places, None]).to(x.dtype))
    return out


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
