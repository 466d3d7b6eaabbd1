"""Measures a model that is split over the GPUs of the machine, beside the same model on one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from tools.engine_load import random_prompts
from tools.gpu.parts import measure_decodes
from tools.gpu.target import Target
from tools.gpu.workload import release
from tools.random_models import byte_tokenizer, random_model, real_shape

MODEL = "llama-3.2-1b"
FEATURES = ("attention", "fused_layers", "one_shot_sums")


def run(target: Target) -> Iterator[dict[str, Any]]:
    if target.is_gpu and torch.cuda.device_count() < 2:
        yield {"left_out": "there is one GPU"}
        return
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
