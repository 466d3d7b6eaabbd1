"""Writes checkpoints whose linear layers are in FP8, as they are published in four layouts.

For tests and attacks. Scales are drawn, not chosen for the weights, so what is written is a model of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.packed import save

Layout = Literal["blocks", "tensor", "fbgemm", "compressed"]
BLOCK = 32  # rows, and columns, of a block that has a scale


def write_fp8(folder: Path, model: PreTrainedModel, layout: Layout) -> None:
    """Write a model with its linear layers in FP8, except for the last. Their columns are multiples of `BLOCK`."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() != 2 or "embed" in name or "lm_head" in name:
            found[name] = parameter.detach().to(torch.bfloat16)
            continue
        base, (n, k) = name.removesuffix(".weight"), parameter.shape
        scale = _scale(n, k, layout)
        found[f"{base}.weight_scale_inv" if layout == "blocks" else f"{base}.weight_scale"] = scale
        whole = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1) if layout == "blocks" else scale
        found[name] = (parameter.detach() / whole).to(torch.float8_e4m3fn)
        found[f"{base}.input_scale"] = torch.tensor(1.0)
    save(folder, model, found, _SETTINGS[layout], "bfloat16")


def _scale(n: int, k: int, layout: Layout) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if layout == "blocks":
        return (torch.randn(-(-n // BLOCK), k // BLOCK, generator=generator).abs() + 0.5) / 64
    if layout == "tensor":
        return torch.tensor(0.02)
    return torch.randn(n, 1, generator=generator).abs() / 64 + 0.01


_SETTINGS: dict[Layout, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "tensor": {"quant_method": "fp8"},
    "fbgemm": {"quant_method": "fbgemm_fp8"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            }
        },
    },
}
