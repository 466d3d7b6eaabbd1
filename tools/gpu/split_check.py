"""Measures a model that is split over the GPUs of the machine, beside the same model on one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from tools.engine_load import random_prompts
from tools.gpu.layer_check import NUM_TOKENS, PROMPTS
from tools.gpu.parts import measure_decodes
from tools.gpu.target import Target
from tools.gpu.workload import release
from tools.packed_checkpoints import Packing, write_checkpoint
from tools.random_models import SMALL, byte_tokenizer, random_model, real_shape

MODEL = "llama-3.2-1b"
FEATURES = ("attention", "fused_layers", "one_shot_sums")
# Families whose layers are cut in different ways: experts, one module for queries, keys and values, norms of all heads.
SPLIT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1},
    "phi3": {"pad_token_id": None},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
}
SIZES = {**SMALL, "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


def check_packed(family: str, target: Target) -> dict[str, Any]:
    """Compare the answers of a packed checkpoint on two devices with those on one, in float32."""
    params, found = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True), []
    # On a CPU, the native step would round what it multiplies, in one process alone.
    compiles = {"compile": target.is_gpu}
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(AutoConfig.for_model(family, **{**SIZES, **SPLIT[family]}))
        write_checkpoint(Path(folder), model, Packing("awq"))
        byte_tokenizer().save_pretrained(folder)
        for number in (1, 2):
            options: dict[str, Any] = {"dtype": "float32", "kv_blocks": 64, "max_running": 8, "tensor_parallel": number}
            with Engine.from_pretrained(folder, device=target.device.type, **options, **compiles) as engine:
                found.append([one.token_ids for one in engine.generate(PROMPTS, params)])
                features = dict(engine.features)
            release()
    is_on = not target.is_gpu or (features["packed_weights"] and features["fused_layers"])
    return {"equal": found[0] == found[1] and is_on, "found": found[1], "expected": found[0], "features": features}


def run(target: Target) -> Iterator[dict[str, Any]]:
    if target.is_gpu and torch.cuda.device_count() < 2:
        yield {"left_out": "there is one GPU"}
        return
    for family in SPLIT:
        yield {family: check_packed(family, target)}
    batch, length, num_tokens = (2, 16, 8) if target.quick else (64, 448, 128)
    config = real_shape(MODEL, tiny=target.quick)
    rows: list[dict[str, Any]] = []
    answers: list[list[list[int]]] = []
    with tempfile.TemporaryDirectory() as folder:
        random_model(config, dtype=torch.bfloat16).save_pretrained(folder)
        byte_tokenizer(config.vocab_size).save_pretrained(folder)
        for number in (1, 2):
            options: dict[str, Any] = {"max_running": batch, "prefix_cache": False, "tensor_parallel": number}
            with Engine.from_pretrained(folder, device=target.device.type, kv_blocks=64 * batch, **options) as engine:
                prompts = random_prompts(batch, length, config.vocab_size)
                greedy = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
                answers.append([one.token_ids for one in engine.generate(prompts[:4], greedy)])
                features = {name: engine.features.get(name, False) for name in FEATURES}
                found = measure_decodes(engine, prompts, num_tokens, repeats=1 if target.quick else 2)
                rows.append({"gpus": number, **features, **found})
            yield {"decodes": rows}
            release()
    # Rounding may decide between two tokens that are as good as equal, so this is no check, but few should differ.
    same = sum(
        one == other for ones, others in zip(*answers, strict=True) for one, other in zip(ones, others, strict=True)
    )
    yield {"decodes": rows, "same_share": same / sum(len(ones) for ones in answers[0])}
