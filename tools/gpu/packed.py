"""Checks weights and experts that stay packed on a GPU: their kernels, against plain torch, and whole checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedModel

from oaiserve.engine.model.attention import FP8
from oaiserve.engine.model.gpu import triton_experts
from oaiserve.engine.model.gpu.device_experts import ExpertMatrices
from oaiserve.engine.model.gpu.device_matrices import Kind, PackedMatrix, expanded_product, of_integers
from oaiserve.engine.model.gpu.triton_matrices import multiply
from oaiserve.engine.start.gpu.products import plain_expert_products
from tests.engine.model.gpu.packed_matrices import floats_in_blocks, integers
from tests.models.decoders import generate, random_model
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint
from tools.engine_load import greedy
from tools.gpu.kernels import check_operations, check_rotation, compared
from tools.gpu.sections import Target
from tools.gpu.workload import PROMPTS, QWEN3_MOE, SIZES, described, ids, model_folder, running_engine

NUM_TOKENS = 12
PACKINGS = {
    "AWQ": Packing("awq"),
    "GPTQ, any order": Packing("gptq", has_act_order=True),
    "GPTQ, 8 bits": Packing("gptq", bits=8),
    "compressed-tensors": Packing("pack-quantized", is_symmetric=True),
}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": QWEN3_MOE,
}


def layers(target: Target) -> Iterator[dict[str, Any]]:
    yield {"operations": list(check_operations(target))}
    yield {"rotation": list(check_rotation(target))}
    yield {"matrices": list(check_matrices(target))}
    for name, packing in PACKINGS.items():
        save = partial(write_checkpoint, packing=packing)
        yield {name: check_checkpoint(LlamaConfig(**SIZES), save, target, has_fp8_cache=True)}


def experts(target: Target) -> Iterator[dict[str, Any]]:
    yield {"experts": list(check_experts(target))}
    for family, sizes in MIXTURES.items():
        config = AutoConfig.for_model(family, **{**SIZES, **sizes})
        yield {family: check_checkpoint(config, save_mixture, target)}


def matrices(n: int, columns: int, device: torch.device) -> dict[str, PackedMatrix]:
    """Make a random matrix of each kind, with groups of 128 columns, or one scale for each row."""
    made = {
        "4 bits": integers(4, n, columns, 128, zeros=False),
        "4 bits with zeros": integers(4, n, columns, 128, zeros=True),
        "8 bits": integers(8, n, columns, 128, zeros=False),
        "FP8": floats_in_blocks(n, columns, (1, 128)),
        "FP8 in rows": floats_in_blocks(n, columns, None),
    }
    return {name: of_integers(matrix).to(device) for name, matrix in made.items()}


@torch.inference_mode()
def check_matrices(target: Target) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    n, columns = (70, 256) if target.quick else (6144, 4096)
    for name, matrix in matrices(n, columns, target.device).items():
        for rows in (1, 7, 20, 50, 300):
            x = torch.randn(rows, columns, dtype=torch.bfloat16, device=target.device)
            # Twice: a product leaves the counters of its programs as it finds them.
            for _ in range(2):
                got = multiply(x, matrix, None)
            yield compared(name, got, expanded_product(x, matrix, None), rows=rows)


# Experts, how many of them a row has, the width of the model, and what is between the layers of an expert.
SHAPES: dict[str, tuple[Kind, int, int, int, int]] = {
    "gpt-oss-20b, MXFP4": ("mxfp4", 32, 4, 2880, 2880),
    "Qwen3-30B-A3B, 4 bits": ("int4", 128, 8, 2048, 768),
    "Qwen3-30B-A3B, FP8": ("float8", 128, 8, 2048, 768),
}


def random_matrices(kind: Kind, number: int, n: int, columns: int, device: torch.device) -> ExpertMatrices:
    group = 32 if kind == "mxfp4" else min(128, columns & -columns)
    scales = torch.rand(number, columns // group, n, device=device)
    if kind == "float8":
        codes = torch.randn(number, n, columns, device=device).to(FP8)
        return ExpertMatrices(kind, codes, scales * 0.01 + 0.001, None, None)
    codes = torch.randint(0, 256, (number, n, columns // 2), dtype=torch.uint8, device=device)
    if kind == "mxfp4":
        bias = torch.randn(number, n, device=device).bfloat16()
        return ExpertMatrices(kind, codes, (118 + 4 * scales).to(torch.uint8), None, bias=bias)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device)
    return ExpertMatrices(kind, codes, (scales * 0.005 + 0.001).half(), zeros, None)


@torch.inference_mode()
def check_experts(target: Target) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    device = target.device
    for name, (kind, number, top_k, width, inner) in SHAPES.items():
        if target.quick:
            number, top_k, width, inner = 6, min(top_k, 6), 64, 128
        for n, columns in ((2 * inner, width), (width, inner)):
            matrices = random_matrices(kind, number, n, columns, device)
            for rows in (1, 7) if target.quick else (1, 7, 64, 700):
                x = torch.randn(rows, columns, device=device).bfloat16()
                chosen = torch.randn(rows, number, device=device).topk(top_k).indices
                plan = triton_experts.planned(chosen, number)
                found = triton_experts.product(x, matrices, plan, pairs_of_row=top_k, factors=None)
                yield compared(name, found, plain_expert_products((matrices, x, chosen)), rows=rows)


def save_mixture(folder: Path, model: PreTrainedModel) -> None:
    """Write the model with packed experts, and give it the weights that they expand to."""
    if model.config.model_type == "gpt_oss":
        model.load_state_dict(save_in_mxfp4(model, folder), strict=False)
    else:
        write_checkpoint(folder, model, Packing("awq"))


def check_checkpoint(
    config: Any,
    save: Callable[[Path, PreTrainedModel], None],
    target: Target,
    *,
    has_fp8_cache: bool = False,
) -> dict[str, Any]:
    """Compare the answers of a packed checkpoint with those of its weights, in float32, and let it
    answer with a KV cache in eight bits."""
    model = random_model(config)
    different = []
    with model_folder() as folder:
        save(Path(folder), model)
        expected = generate(model, PROMPTS, NUM_TOKENS)
        files = described(folder, target.device)
        for kv_cache_dtype in ("auto", "fp8") if target.is_gpu and has_fp8_cache else ("auto",):
            settings: dict[str, Any] = {"block_size": 16, "kv_blocks": 64, "max_running": 8}
            with running_engine(files, **settings, kv_cache_dtype=kv_cache_dtype) as engine:
                found = ids(engine, PROMPTS, greedy(NUM_TOKENS))
            if kv_cache_dtype == "auto" and found != expected:
                different.append(f"{found} and not {expected}")
    return {"equal": not different, "different": different}
