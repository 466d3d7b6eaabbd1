"""Random LoRA adapters, as folders in PEFT's format and as tensors, and models with one in their weights."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from oaiserve.engine.model.adapters import Adapter, AdapterPart


def write_adapter(
    folder: Path, shapes: Mapping[str, tuple[int, int]], *, rank: int = 8, size: float = 1.0, **config: Any
) -> Path:
    """Write an adapter for layers of these shapes [rows, columns], by the names of their modules; return its folder.

    What it adds is about `size` times as large as usual weights. `config` are further settings of PEFT.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        a = torch.randn(rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, rank, generator=generator) * size / rank**0.5
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(shapes)} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def random_adapter(
    shapes: Mapping[str, tuple[int, int]], seed: int, *, rank: int = 4, dtype: torch.dtype = torch.float32
) -> Adapter:
    """Return an adapter for layers of these shapes that changes answers. Its ranks differ from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    parts = {}
    for index, (name, (rows, columns)) in enumerate(shapes.items()):
        own_rank = rank + index % 3
        a = torch.randn(own_rank, columns, generator=generator) / columns**0.5
        b = torch.randn(rows, own_rank, generator=generator) * 0.5
        parts[name] = AdapterPart(a.to(dtype), b.to(dtype), 0.7 + 0.1 * (index % 4))
    return Adapter(f"random {seed}", parts)


def adaptable(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """Return rows and columns of each linear layer for adapters, by the name of its module.

    Excepted are the output head, layers with only some of a step's tokens, such as experts, and layers whose result is
    not their product, such as some routers.
    """
    head = model.get_output_embeddings()
    found: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if module is head or ".experts." in name:
            continue
        if isinstance(module, torch.nn.Linear) and not hasattr(module, "top_k"):
            found[name] = (module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            found[name] = (module.nf, module.nx)
    return found


@torch.no_grad()
def merged(model: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """Return a copy of the model with the adapter in its weights: W + scale * B A, the definition of LoRA."""
    copied = deepcopy(model)
    for name, part in adapter.parts.items():
        module = copied.get_submodule(name)
        added = part.scale * part.b @ part.a
        module.weight += added.T if isinstance(module, Conv1D) else added
    return copied
