"""Lets linear layers and experts of a model on a GPU have their matrices as its checkpoint packs them."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path

import torch
from transformers import PreTrainedModel

from oaiserve.engine.decoder.description import NotKnown
from oaiserve.engine.decoder.sources.mxfp4_weights import Mxfp4Weights
from oaiserve.engine.decoder.sources.packed_weights import PackedWeights
from oaiserve.engine.model.gpu.device_experts import keep_experts, mxfp4, stacked
from oaiserve.engine.model.gpu.device_matrices import MXFP4_TILE, PackedLinear, PackedMatrix, joined, of_integers
from oaiserve.files.bad_file import BadFile

log = logging.getLogger(__name__)

# The names that checkpoints have for the matrices of one expert: its gate, its up, its down projection.
_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def keep_packed_matrices(model: PreTrainedModel, weights: PackedWeights) -> int:
    """Give linear layers, but the head, their matrices as a checkpoint packs them, and return their number.

    Groups are multiples of 32 columns."""
    number, names, head = 0, weights.names(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module is head:
            continue
        matrix = weights.matrix(f"{name}.weight") if f"{name}.weight" in names else None
        if matrix is not None and (packed := of_integers(matrix)) is not None:
            PackedLinear.replace(module, packed.to(module.weight.device))
            number += 1
    return number


def keep_packed_experts(model: PreTrainedModel, weights: PackedWeights) -> int:
    """Give experts their matrices as a checkpoint packs them, and return the number of their layers.

    All of a layer must be packed alike, in groups of multiples of 32 columns."""
    number, names = 0, weights.names()
    for name, module in model.named_modules():
        tensor = module._parameters.get("gate_up_proj")
        if tensor is None or tensor.dim() != 3 or not getattr(module, "is_concatenated", False):
            continue
        own = name, name.replace(".mlp.", ".block_sparse_moe.")
        for base, parts in product(own, _EXPERT_NAMES):
            if f"{base}.0.{parts[0]}.weight" not in names:
                continue
            names_of = [[f"{base}.{i}.{part}.weight" for part in parts] for i in range(len(tensor))]
            packed = [[_packed(weights, one) for one in own] for own in names_of]
            both = [joined([gate, up]) if gate and up else None for gate, up, _ in packed]
            stacks = [stacked(matrices) for matrices in (both, [down for *_, down in packed])]
            if stacks[0] is not None and stacks[1] is not None:
                keep_experts(module, stacks[0].to(tensor.device), stacks[1].to(tensor.device))
                number += 1
            break
    return number


def _packed(weights: PackedWeights, name: str) -> PackedMatrix | None:
    """Return a packed matrix of an expert, or None without one."""
    matrix = weights.matrix(name)
    return None if matrix is None else of_integers(matrix)


def experts_in_mxfp4(folder: Path) -> Mxfp4Weights | None:
    """Return the weights of a checkpoint whose experts can stay in MXFP4, or None if they have to be expanded."""
    try:
        weights = Mxfp4Weights(folder)
    except (NotKnown, BadFile) as error:
        log.debug("The experts are expanded: %s", error)
        return None
    if any(weights.shape(name)[1] % MXFP4_TILE for name in weights.of_experts()):
        log.debug("The experts are expanded: their columns are no multiples of %d", MXFP4_TILE)
        return None
    return weights


def keep_mxfp4_experts(model: PreTrainedModel, weights: Mxfp4Weights) -> int:
    """Let the experts of a model have their matrices as a checkpoint in MXFP4 has them, and return how many layers."""
    number = 0
    for name, module in model.named_modules():
        if f"{name}.gate_up_proj" not in weights.of_experts():
            continue
        both, down = (
            mxfp4(*weights.codes_and_scales(f"{name}.{part}"), getattr(module, f"{part}_bias").data)
            for part in ("gate_up_proj", "down_proj")
        )
        assert both is not None
        assert down is not None
        keep_experts(module, both, down)
        number += 1
    return number
