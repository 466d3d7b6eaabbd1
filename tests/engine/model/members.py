"""Computes what each of two members of a split model does, as on GPUs, but with gloo, and with Triton's interpreter
or doubles of its kernels in plain torch.

`python -m tests.engine.model.members RANK STORE FILE FOLDER...` is one of them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.model import layer_operations
from oaiserve.engine.model.attention.reference import ReferenceAttention
from oaiserve.engine.model.attention.triton import TritonAttention
from oaiserve.engine.model.gpu.device_experts import packed_experts, plain_experts
from oaiserve.engine.model.gpu.device_matrices import expanded_product, packed_linears
from oaiserve.engine.model.gpu.fused_layers import FusedExecutor
from oaiserve.engine.model.gpu.keep_packed import keep_packed_experts, keep_packed_matrices
from oaiserve.engine.model.parallel import group
from oaiserve.engine.model.parallel.group import Member
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.start.gpu import fast_paths, kernels, layers, products
from oaiserve.engine.start.load import load_model
from oaiserve.engine.start.ways import gpu as way
from tests.engine.model.gpu.packed_matrices import weights_in
from tests.engine.model.steps import BLOCK_SIZE, logits_of

NUM_BLOCKS, NUM_MEMBERS = 8, 2
LENGTHS = [3, 17]


class Computed(NamedTuple):
    logits: list[torch.Tensor]  # of prompts, and of their decodes
    num_packed: int  # matrices, and layers of experts
    is_fused: bool
    multiplies_by: str  # the name of the function


def computed(rank: int, store: Path, folder: Path, *, by_kernels: bool = False, fails: bool = False) -> Computed:
    """Load a member's part as on a GPU, and compute with it. With `fails`, products of the last member are wrong."""
    store.mkdir(exist_ok=True)
    with group.environment(rank), pytest.MonkeyPatch.context() as patch:
        member = Member(rank, NUM_MEMBERS, lambda device: group.join(rank, NUM_MEMBERS, device, store, 2))
        loaded = load_model(folder, device="cpu", dtype="float32", member=member)
        if "quantization_config" in json.loads((folder / "config.json").read_text()):
            for keep in (keep_packed_matrices, keep_packed_experts):
                keep(loaded.model, weights_in(folder), loaded.sums)
        patch.setattr(LoadedModel, "is_on_cpu", False)
        patch.setattr(way, "_sizes", lambda *_: (NUM_BLOCKS, 0, None))
        backend = TritonAttention if by_kernels else lambda batch: ReferenceAttention(batch)
        patch.setattr(fast_paths, "select_backend", lambda device, name: backend)
        patch.setattr(fast_paths, "_sampling", lambda: (None, None))
        patch.setattr(kernels, "LENGTHS", (2, 2, 2, 3))
        patch.setattr(layers, "FUSED_LENGTHS", (3,))
        patch.setattr(products, "PRODUCT_ROWS", (1, 3))
        patch.setattr(fast_paths, "scale_checked", lambda *_: False)
        if not by_kernels:
            factor = 2 if fails and rank == NUM_MEMBERS - 1 else 1

            def multiply(*arguments: Any) -> torch.Tensor:
                return factor * expanded_product(*arguments)

            patch.setattr(layers, "_operations", lambda: layer_operations)
            plain = SimpleNamespace(multiply=multiply, compute=plain_experts)
            patch.setattr(fast_paths, "_kernels", lambda module: plain)
        options = EngineOptions(block_size=BLOCK_SIZE, tensor_parallel=NUM_MEMBERS)
        executor = way.start_member(loaded, options)._executor
        found = logits_of(executor, LENGTHS, loaded.vocab_size)
        group.leave(broken=False)
    linears = packed_linears(loaded.model)
    return Computed(
        found,
        len(linears) + len(packed_experts(loaded.model)),
        isinstance(executor, FusedExecutor),
        linears[0].multiply.__name__ if linears else "",
    )


def of_all(rank: int, store: Path, folders: list[Path]) -> list[Computed]:
    """Compute with each model, the last one by kernels, and with that once more, where products fail at one member."""
    found = [computed(rank, store / folder.name, folder, by_kernels=folder is folders[-1]) for folder in folders]
    return [*found, computed(rank, store / "fails", folders[-1], fails=True)]


if __name__ == "__main__":
    _, rank, store, file, *folders = sys.argv
    found = of_all(int(rank), Path(store), [Path(folder) for folder in folders])
    torch.save([tuple(one) for one in found], file)
