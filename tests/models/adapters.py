"""Makes LoRA adapters with random weights, as folders in PEFT's format, for tests and for measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    *,
    rank: int = 8,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
    **config: Any,
) -> Path:
    """Write an adapter for layers of these shapes [rows, columns], by the names of their modules; return its folder.

    What it adds is about `size` times as large as usual weights. `config` are further settings of PEFT.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) * size / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{name}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shapes)} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
