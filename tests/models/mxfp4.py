"""Makes checkpoints whose experts are in MXFP4, with random weights, for tests."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

_HALVES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # what the codes mean


def save_in_mxfp4(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Save a gpt-oss model with random numbers of MXFP4 in place of its experts' weights. Return these, expanded."""
    model.save_pretrained(folder)
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors, expanded = load_file(path), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, width, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, width // 32, 16), generator=generator)
        scales = torch.randint(117, 123, (experts, rows, width // 32), generator=generator)
        tensors |= {f"{name}_blocks": blocks.to(torch.uint8), f"{name}_scales": scales.to(torch.uint8)}
        numbers = torch.stack([_HALVES[blocks % 16], _HALVES[blocks // 16]], dim=-1).flatten(-2)
        expanded[name] = (numbers * 2.0 ** (scales[..., None] - 127)).flatten(-2).transpose(1, 2)
    save_file(tensors, path, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return expanded
