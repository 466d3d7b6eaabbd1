"""Checks experts that stay packed on a GPU, by kernels, against plain torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import AutoConfig

from oaiserve.engine.model.gpu.device_experts import ExpertMatrices, PackedExperts, plain_experts
from oaiserve.engine.model.gpu.device_matrices import Kind
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.start.gpu.products import ROUNDED_EXPERTS_TOLERANCE
from oaiserve.engine.start.load import load_model
from tests.models.decoders import SMALL, generate, random_model
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint
from tools.gpu.layer_check import NUM_TOKENS, PROMPTS, compare
from tools.gpu.target import Target
from tools.gpu.workload import running_engine

ROWS = (1, 7, 64, 700)
# Experts, how many of them a row has, the width of the model, and what is between the layers of an expert.
SHAPES: dict[str, tuple[Kind, int, int, int, int]] = {
    "gpt-oss-20b, MXFP4": ("mxfp4", 32, 4, 2880, 2880),
    "Qwen3-30B-A3B, 4 bits": ("int4", 128, 8, 2048, 768),
    "Qwen3-30B-A3B, FP8": ("float8", 128, 8, 2048, 768),
    "Qwen3-30B-A3B, 16 bits": ("plain", 128, 8, 2048, 768),
}
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
}


def run(target: Target) -> Iterator[dict[str, Any]]:
    if find_spec("triton") is None:
        yield {"problem": "Triton is not installed: there are no kernels of ours."}
    else:
        yield {"experts": list(check_experts(target))}
        for family in MIXTURES:
            yield {family: check_checkpoint(family, target)}


class _Gating:
    """Says how experts combine gate and up: plainly, or as gpt-oss does it."""

    def __init__(self, kind: Kind) -> None:
        self.is_concatenated = kind != "mxfp4"
        if not self.is_concatenated:
            self.alpha, self.limit = 1.702, 7.0

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        if self.is_concatenated:
            gate, up = both.chunk(2, dim=-1)
            return silu(gate) * up
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def random_experts(kind: Kind, number: int, width: int, inner: int, device: torch.device) -> PackedExperts:
    def matrices(n: int, columns: int) -> ExpertMatrices:
        if kind == "plain":
            weights = torch.randn(number, n, columns, dtype=torch.bfloat16, device=device) / columns**0.5
            return ExpertMatrices(kind, weights, torch.ones(number, 1, n, device=device), None, None)
        group = min(128, columns & -columns)
        if kind == "float8":
            floats = torch.randn(number, n, columns, device=device).to(torch.float8_e4m3fn)
            of_blocks = torch.rand(number, columns // group, n, device=device) * 0.01 + 0.001
            return ExpertMatrices(kind, floats, of_blocks, None, None)
        codes = torch.randint(0, 256, (number, n, columns // 2), dtype=torch.uint8, device=device)
        if kind == "mxfp4":
            scales = torch.randint(118, 122, (number, columns // 32, n), device=device).to(torch.uint8)
            return ExpertMatrices(kind, codes, scales, None, torch.randn(number, n, device=device).bfloat16())
        zeros = torch.randint(0, 16, (number, columns // group, n), dtype=torch.uint8, device=device)
        scales = (torch.rand(number, columns // group, n, device=device) * 0.005 + 0.001).half()
        return ExpertMatrices(kind, codes, scales, zeros, None)

    return PackedExperts(_Gating(kind), matrices(2 * inner, width), matrices(width, inner))


def inputs(num_rows: int, number: int, top_k: int, width: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return hidden states, the experts of each row, and their weights."""
    x = torch.randn(num_rows, width, device=device).bfloat16()
    weights, chosen = torch.randn(num_rows, number, device=device).topk(top_k)
    return x, chosen, weights.softmax(-1).bfloat16()


@torch.inference_mode()
def check_experts(target: Target) -> Iterator[dict[str, Any]]:
    from oaiserve.engine.model.gpu.triton_experts import compute

    torch.manual_seed(0)
    for name, (kind, number, top_k, width, inner) in SHAPES.items():
        if target.quick:
            number, width, inner = 6, 64, 128
        experts = random_experts(kind, number, width, inner, target.device)
        for num_rows in ROWS[:2] if target.quick else ROWS:
            given = inputs(num_rows, number, min(top_k, number), width, target.device)
            want = plain_experts(experts, *given)
            yield compare(name, compute(experts, *given), want, rows=num_rows)
            if kind == "float8":
                found = compute(experts, *given, is_rounded=True)
                yield compare(f"{name}, in 8 bits", found, want, ROUNDED_EXPERTS_TOLERANCE, rows=num_rows)


def check_checkpoint(family: str, target: Target) -> dict[str, Any]:
    """Compare the answers of a checkpoint with packed experts with those of its weights, in float32."""
    model = random_model(AutoConfig.for_model(family, **{**WIDE, **MIXTURES[family]}))
    with tempfile.TemporaryDirectory() as folder:
        if family == "gpt_oss":
            expanded = save_in_mxfp4(model, Path(folder))
            model.load_state_dict(expanded, strict=False)
        else:
            write_checkpoint(Path(folder), model, Packing("awq"))
        expected = generate(model, PROMPTS, NUM_TOKENS)
        loaded = load_model(folder, device=target.device.type, dtype="float32")
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    with running_engine(loaded, block_size=16, kv_blocks=64, max_running=8) as engine:
        found = [completion.token_ids for completion in engine.generate(PROMPTS, params)]
        features = dict(engine.features)
    different = [] if found == expected else [f"{found} and not {expected}"]
    if target.is_gpu and not (features["packed_experts"] and features["fused_layers"] and features["decode_graphs"]):
        different.append(f"not everything is on: {features}")
    return {"equal": not different, "different": different}
