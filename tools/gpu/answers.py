"""Checks that the engine's answers are right with and without kernels, CUDA graphs and overlap.

Small models of every family are compared with transformers' `generate`, models of real shapes with their plainest mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from tests.models.decoders import FAMILIES, generate, random_model, real_shape
from tests.models.packed import Packing, write_checkpoint
from tests.models.small_configs import config_of
from tools.engine_load import greedy, random_prompts
from tools.gpu.sections import Target
from tools.gpu.workload import (
    PROMPTS,
    QWEN3_MOE,
    SIZES,
    Files,
    blocks_for,
    described,
    ids,
    model_folder,
    release,
    running_engine,
    saved,
)

NUM_TOKENS = 12
HYBRIDS = ("falcon_h1", "lfm2")  # families with a state in some layers
# Quantized checkpoints: the type of the model, and how its matrices are packed.
PACKED = {
    "AWQ": ("llama", Packing("awq")),
    "GPTQ in any order": ("llama", Packing("gptq", has_act_order=True)),
    "8 bits": ("llama", Packing("gptq", bits=8)),
    "AWQ with experts": ("qwen3_moe", Packing("awq")),
}
# Two tokens tie if their logits differ by less than this, in standard deviations of all logits: bfloat16 rounds as much
# away in another order of additions. Tokens picked at random differ by several.
NEAR_TIE = 0.1

Answers = list[list[int]]


def families(target: Target) -> Iterator[dict[str, Any]]:
    for name in (*FAMILIES, *HYBRIDS):
        model = random_model(FAMILIES.get(name) or config_of(name), device=target.device)
        with saved(model) as files:
            yield {name: check_model(model, files, MODES if target.is_gpu else [{}])}
    for name, (family, packing) in PACKED.items():
        model = random_model(AutoConfig.for_model(family, **SIZES, **(QWEN3_MOE if family == "qwen3_moe" else {})))
        with model_folder() as folder:
            write_checkpoint(Path(folder), model, packing)  # also sets the model's weights to the packed ones
            yield {name: check_model(model, described(folder, target.device), [{}])}


def shapes(target: Target) -> Iterator[dict[str, Any]]:
    names = ["gpt2-124m"] if target.quick else ["gpt2-124m", "llama-3.2-1b"]
    for name, dtype in product(names, (torch.float32, torch.bfloat16)):
        yield {f"{name}, {str(dtype).removeprefix('torch.')}": check_shape(name, dtype, target)}
        release()


# Settings of a GPU that must not change an answer, the plainest first.
MODES: list[dict[str, bool]] = [
    {"compile": False, "overlap": False},
    {"cuda_graph": False, "overlap": False},
    {"cuda_graph": False},
    {"overlap": False},
    {},
]


def check_model(model: PreTrainedModel, files: Files, modes: list[dict[str, bool]]) -> dict[str, Any]:
    """Compare greedy answers with `generate`, and drawn ones with the first mode's: in float32, batched, in chunks."""
    expected = generate(model, PROMPTS, NUM_TOKENS)
    sampled = replace(greedy(NUM_TOKENS), temperature=0.9, top_p=0.95, seed=7)
    different = []
    drawn = []
    settings = {"block_size": 4, "kv_blocks": 64, "max_running": 8, "max_step_tokens": 9}
    for mode in modes:
        with running_engine(files, **settings, **mode) as engine:
            if ids(engine, PROMPTS, greedy(NUM_TOKENS)) != expected:
                different.append(f"greedy, {mode}")
            drawn.append(ids(engine, PROMPTS, sampled))
        if drawn[-1] != drawn[0]:
            different.append(f"drawn, {mode}")
    return {"equal": not different, "modes": len(drawn), "tokens": sum(map(len, expected)), "different": different}


def check_shape(name: str, dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """Compare the answers of all modes with those of the plainest.

    All requests run at once, so that every decode step has as many sequences as a graph. In float32 answers must be
    equal. In bfloat16 greedy answers may differ from a tie on, and drawn ones that differ are only counted, because
    rounding moves the borders between tokens.
    """
    model = random_model(real_shape(name, tiny=target.quick), dtype=dtype, device=target.device)
    count = 16
    length = 32
    num_tokens = 32
    prompts = random_prompts(count, length, model.config.vocab_size)
    sampled = replace(greedy(num_tokens), temperature=0.8, top_k=50, top_p=0.9, seed=11)
    kv_blocks = 2 * blocks_for(count, length + num_tokens)
    found: list[tuple[Answers, Answers]] = []
    with saved(model) as files:
        for mode in MODES:
            with running_engine(files, kv_blocks=kv_blocks, max_running=count, **mode) as engine:
                found.append((ids(engine, prompts, greedy(num_tokens)), ids(engine, prompts, sampled)))
    (first_greedy, first_drawn), *others = found
    different = [difference for greedy, _ in others for difference in compare(model, prompts, first_greedy, greedy)]
    drawn_differently = [sum(a != b for a, b in zip(first_drawn, drawn, strict=True)) for _, drawn in others]
    if dtype == torch.float32:
        equal = not different and not any(drawn_differently)
    else:
        equal = all(difference["is_near_tie"] for difference in different)
    return {
        "equal": equal,
        "modes": len(found),
        "answers": count,
        "tokens_each": num_tokens,
        "different": different,
        "drawn_differently": drawn_differently,
    }


def compare(
    model: PreTrainedModel, prompts: list[list[int]], first: Answers, second: Answers
) -> Iterator[dict[str, Any]]:
    """Report for each pair of answers that differ where the first difference is, and whether the two tokens tie."""
    for index, (prompt, a, b) in enumerate(zip(prompts, first, second, strict=True)):
        if a != b:
            place = next(i for i in range(min(len(a), len(b))) if a[i] != b[i])
            distance = tie_distance(model, prompt + a[:place], a[place], b[place])
            yield {"answer": index, "token": place, "distance": distance, "is_near_tie": distance < NEAR_TIE}


@torch.inference_mode()
def tie_distance(model: PreTrainedModel, token_ids: list[int], one: int, other: int) -> float:
    """Return how far the worse of two next tokens is behind the best one, in standard deviations of all logits."""
    logits = model(torch.tensor([token_ids], device=model.device)).logits[0, -1].float()
    return float((logits.max() - logits[[one, other]].min()) / logits.std())
