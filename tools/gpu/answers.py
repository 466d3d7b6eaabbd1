"""Checks that the engine's answers are right with and without kernels, CUDA graphs and overlap.

Small models of every family are compared with transformers, and models of real shapes with their plainest mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from oaiserve.checkpoints.source import find_model
from oaiserve.config import EngineOptions
from oaiserve.engine.start.described import Described, describe_model
from tests.models.decoders import FAMILIES, greedy, random_model, real_shape
from tests.models.packed import Packing, write_checkpoint
from tests.models.pinned import PINNED
from tools import engine_load
from tools.engine_load import random_prompts
from tools.gpu.doubles import running
from tools.gpu.models import described_on, sensitive
from tools.gpu.sections import Target
from tools.gpu.side_by_side import NO_NUMBERS, TOGETHER, checked
from tools.gpu.ties import Answers, compare
from tools.gpu.workload import PROMPTS, QWEN3_MOE, SIZES, blocks_for, ids, model_folder, started

# Settings of a GPU that must not change an answer, the plainest first.
MODES: list[dict[str, bool]] = [
    {"compile": False, "overlap": False},
    {"cuda_graph": False, "overlap": False},
    {"cuda_graph": False},
    {"overlap": False},
    {},
]
FASTEST = MODES[-1:]
NUM_TOKENS = 12
FAMILIES_AT_ONCE = 4
SHAPES_AT_ONCE = 2
LIMIT_SECONDS = 100.0
# Few sizes of graphs: prompts of up to nine tokens, which cut longer ones, alone and beside up to eight decodes.
SETTINGS = {"block_size": 4, "kv_blocks": 64, "max_running": 8, "max_step_tokens": 9, **TOGETHER}
# Quantized checkpoints: the type of the model, and how its matrices are packed.
PACKED = {
    "AWQ": ("llama", Packing("awq")),
    "GPTQ in any order": ("llama", Packing("gptq", has_act_order=True)),
    "8 bits": ("llama", Packing("gptq", bits=8)),
    "AWQ with experts": ("qwen3_moe", Packing("awq")),
}
# Families whose layers have something of their own are compared in all modes, the others in the fastest.
OWN_LAYERS = (
    *("gemma4_text with experts", "gpt_oss", "qwen3_next", "bamba", "deepseek_v3", "qwen3_moe", "lfm2", "mamba2"),
    *("phi", "olmo_hybrid"),
)
QUICK = ("llama", "lfm2", "AWQ")


def families(target: Target) -> Iterator[dict[str, Any]]:
    """Compare small models of every family with transformers."""
    yield from checked(
        names_of(target),
        f"{__name__}:check_family",
        target,
        at_once=2 if target.quick else FAMILIES_AT_ONCE,
        limit_seconds=LIMIT_SECONDS,
    )


def names_of(target: Target) -> list[str]:
    """Return the names of all small models, the most telling first."""
    if target.quick:
        return [*QUICK]
    others = [name for name, pinned in PINNED.items() if pinned.dtype == torch.float32]
    return list(dict.fromkeys([*OWN_LAYERS, *PACKED, *FAMILIES, *others]))


def check_family(target: Target, name: str) -> dict[str, Any]:
    """Compare a small model's answers with those of transformers' code on the CPU, in float32."""
    torch.set_num_threads(min(2, torch.get_num_threads()))  # since several processes compare families at once
    with model_folder() as folder:
        if name in PACKED:
            family, packing = PACKED[name]
            experts = QWEN3_MOE if family == "qwen3_moe" else {}
            model = random_model(AutoConfig.for_model(family, **SIZES, **experts))
            write_checkpoint(Path(folder), model, packing)  # also sets the model's weights to the packed ones
        else:
            model = random_model(_small(name))
            model.save_pretrained(folder)
        options = EngineOptions(dtype="float32", compile=False)
        described = describe_model(find_model(folder), options, device=target.device)
        modes = MODES if name in (*OWN_LAYERS, *FAMILIES) and not target.is_dry else FASTEST
        return check_model(model, described, target, modes)


def _small(name: str) -> PreTrainedConfig:
    return FAMILIES[name] if name in FAMILIES else PINNED[name].config


def check_model(
    model: PreTrainedModel, described: Described, target: Target, modes: list[dict[str, bool]]
) -> dict[str, Any]:
    """Compare greedy answers with transformers', and drawn ones, with and without penalties, with the first mode's:
    batched, and in chunks.

    Greedy answers are what `generate` returns if transformers' code finds each token best after those before it.
    """
    sampled = replace(engine_load.greedy(NUM_TOKENS), temperature=0.9, top_p=0.95, seed=7)
    penalised = replace(sampled, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    different = []
    drawn = []
    num_tokens = 0
    for mode in modes:
        with running(described, target, **SETTINGS, **mode) as engine:
            answers = ids(engine, PROMPTS, engine_load.greedy(NUM_TOKENS))
            drawn.append(ids(engine, PROMPTS, sampled) + ids(engine, PROMPTS, penalised))
        del engine
        num_tokens += sum(map(len, answers))
        if not target.is_dry and greedy(model, PROMPTS, answers) != answers:
            different.append(f"greedy, {mode}")
        if drawn[-1] != drawn[0]:
            different.append(f"drawn, {mode}")
    found = {"modes": len(drawn), "tokens": num_tokens}
    if target.is_dry:
        return {"problem": NO_NUMBERS, **found}
    return {"equal": not different, **found, "different": different}


def shapes(target: Target) -> Iterator[dict[str, Any]]:
    """Compare the modes of models with real shapes."""
    names = [name for name in SHAPES if not target.quick or name.startswith("gpt2")]
    yield from checked(
        names, f"{__name__}:check_shape", target, at_once=SHAPES_AT_ONCE, limit_seconds=2 * LIMIT_SECONDS
    )


SHAPES = {
    f"{name}, {str(dtype).removeprefix('torch.')}": (name, dtype)
    for name in ("llama-3.2-1b", "gpt2-124m")
    for dtype in (torch.bfloat16, torch.float32)
}


def check_shape(target: Target, name: str) -> dict[str, Any]:
    """Compare the answers of all modes with those of the plainest.

    All requests run at once, so that every decode step has as many sequences as a graph. In float32 answers must be
    equal. In bfloat16 greedy answers may differ from a tie on, and drawn ones that differ are only counted, because
    rounding moves the borders between tokens.
    """
    shape, dtype = SHAPES[name]
    model = described_on(sensitive(real_shape(shape, tiny=target.quick)), target.device, dtype=dtype)
    count = 16
    length = 32
    num_tokens = 8 if target.quick else 32
    prompts = random_prompts(count, length, model.spec.vocab_size)
    sampled = replace(engine_load.greedy(num_tokens), temperature=0.8, top_k=50, top_p=0.9, seed=11)
    settings = {"max_running": count, "max_step_tokens": 256, **TOGETHER}
    settings["kv_blocks"] = 2 * blocks_for(count, length + num_tokens)
    found: list[tuple[Answers, Answers]] = []
    for mode in FASTEST if target.is_dry else MODES:
        with running(model, target, **settings, **mode) as engine:
            found.append((ids(engine, prompts, engine_load.greedy(num_tokens)), ids(engine, prompts, sampled)))
        del engine
    (first_greedy, first_drawn), *others = found
    checked_modes = {"modes": len(found), "answers": count, "tokens_each": num_tokens}
    if target.is_dry:
        return {"problem": NO_NUMBERS, **checked_modes}
    different: list[dict[str, Any]] = []
    if any(greedy != first_greedy for greedy, _ in others):
        options = EngineOptions(**settings, **MODES[0])
        runner = started(model, options, target).runner
        for mode, (greedy, _) in zip(MODES[1:], others, strict=True):
            compared = compare(runner, options.block_size, prompts, first_greedy, greedy)
            different += [{"mode": str(mode), **difference} for difference in compared]
    drawn_differently = [sum(a != b for a, b in zip(first_drawn, drawn, strict=True)) for _, drawn in others]
    if dtype == torch.float32:
        equal = not different and not any(drawn_differently)
    else:
        equal = all(difference["is_near_tie"] for difference in different)
    return {"equal": equal, **checked_modes, "different": different, "drawn_differently": drawn_differently}
