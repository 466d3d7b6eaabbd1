"""Probes the kernels of models as the server's start does: few layers with real widths, and small ones under a memory
checker."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.config import EngineOptions
from oaiserve.engine.start.gpu.child import COMMAND, Order, probed
from tests.models.decoders import random_model
from tests.models.packed import Packing, save_in_mxfp4, write_checkpoint, write_fp8
from tests.models.small_configs import config_of
from tools.gpu.sections import Target
from tools.gpu.workload import model_folder

AT_ONCE = 5
LIMIT_SECONDS = 240.0
CHECKER = "/usr/local/cuda/bin/compute-sanitizer"
_AWQ = Packing("awq", group_size=128)
_LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN_MOE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A model type with its sizes, how its matrices are stored, and options of the start."""

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    packing: Packing | str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    is_small: bool = False

    def config(self) -> PreTrainedConfig:
        if self.is_small:
            return config_of(self.family, **self.sizes)
        sizes = {"num_hidden_layers": 2, "vocab_size": 32_768, **self.sizes}
        found: PreTrainedConfig = AutoConfig.for_model(self.family, **sizes)
        return found


CASES = {
    "GPT-2 124M": Case("gpt2"),
    "Llama 3.2 1B": Case("llama", {**_LLAMA_1B, "head_dim": 64, "vocab_size": 128_256}),
    "Llama 3.1 8B, adapters": Case(
        "llama",
        {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8},
        options={"lora_dir": Path("unread")},
    ),
    "Gemma 2 9B": Case(
        "gemma2",
        {"hidden_size": 3584, "intermediate_size": 14_336, "num_attention_heads": 16, "num_key_value_heads": 8},
    ),
    "Qwen3 8B, cache in FP8": Case(
        "qwen3",
        {"hidden_size": 4096, "intermediate_size": 12_288, "num_key_value_heads": 8},
        options={"kv_cache_dtype": "fp8"},
    ),
    "Qwen3 30B A3B": Case("qwen3_moe", {**_QWEN_MOE, "num_experts": 128}),
    "Qwen3 30B A3B, AWQ": Case("qwen3_moe", {**_QWEN_MOE, "num_experts": 16}, _AWQ),
    "gpt-oss 20B, MXFP4": Case(
        "gpt_oss", {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 8}, "mxfp4"
    ),
    "Llama 3.2 1B, AWQ": Case("llama", _LLAMA_1B, _AWQ),
    "Llama 3.2 1B, GPTQ in 8 bits": Case("llama", _LLAMA_1B, Packing("gptq", bits=8, group_size=128)),
    "Llama 3.2 1B, FP8": Case("llama", _LLAMA_1B, "fp8"),
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Where each tensor has memory of its own, there are no graphs.
_NO_GRAPHS = {"cuda_graph": False}
SMALL_CASES = {
    "Gemma 2, adapters": Case("gemma2", options=_NO_GRAPHS | {"lora_dir": Path("unread")}, is_small=True),
    "Llama, AWQ": Case("llama", {"intermediate_size": 128}, Packing("awq"), _NO_GRAPHS, is_small=True),
    "Llama, cache in FP8": Case("llama", options=_NO_GRAPHS | {"kv_cache_dtype": "fp8"}, is_small=True),
    "Qwen3 with experts": Case("qwen3_moe", _MOE, options=_NO_GRAPHS, is_small=True),
    "Bamba, with states": Case("bamba", options=_NO_GRAPHS, is_small=True),
}


def run(target: Target) -> Iterator[dict[str, Any]]:
    """Probe models with real widths."""
    yield from _all(SMALL_CASES if target.quick else CASES, target.device, ())


# transformers changes the default dtype of the process while it makes a model, so threads take turns.
_MAKES_MODEL = Lock()


def memory(target: Target) -> Iterator[dict[str, Any]]:
    """Probe small models under NVIDIA's memory checker, if it is installed."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    found = shutil.which("compute-sanitizer") or shutil.which(CHECKER)
    yield {"checker": found or "compute-sanitizer is not installed"}
    yield from _all(SMALL_CASES, target.device, () if found is None else (found, "--tool", "memcheck"))


def _all(cases: dict[str, Case], device: torch.device, checker: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {name: pool.submit(_probe, case, device, checker) for name, case in cases.items()}
        for name, found in running.items():
            yield {name: found.result()}


def _probe(case: Case, device: torch.device, checker: tuple[str, ...]) -> dict[str, Any]:
    """Return whether no feature has a problem, and the checker finds none, and what the reasons are."""
    errors: list[str] = []
    with model_folder() as folder, tempfile.TemporaryDirectory() as logs:
        with _MAKES_MODEL:
            write(case, Path(folder), device)
        options = EngineOptions(dtype="bfloat16", max_running=64, **case.options)
        command = (*checker, "--log-file", f"{logs}/%p", *COMMAND) if checker else COMMAND
        verdict = probed(Order(folder, options, str(device)), command, LIMIT_SECONDS)
        if checker:
            lines = [line for file in Path(logs).iterdir() for line in file.read_text(errors="replace").splitlines()]
            is_sound = any("ERROR SUMMARY: 0 errors" in line for line in lines)
            errors = [] if is_sound else [*lines[:20], *lines[-1:]] or ["the checker wrote nothing"]
    if verdict is None:
        return {"equal": False, "problem": "the model could not be started"}
    problems = {name: reason for name, reason in verdict.items() if reason}
    is_right = not problems and not errors
    return {"equal": is_right, "problems": problems, "on": sorted(verdict.keys() - problems), "errors": errors}


def write(case: Case, folder: Path, device: torch.device) -> None:
    """Write the files of a model with random weights, which the device makes if they are not packed."""
    model = random_model(case.config(), dtype=torch.bfloat16, device="cpu" if case.packing is not None else device)
    if case.packing == "mxfp4":
        save_in_mxfp4(model, folder)
    elif case.packing == "fp8":
        write_fp8(folder, model, "blocks")
    elif isinstance(case.packing, Packing):
        write_checkpoint(folder, model, case.packing)
    else:
        model.save_pretrained(folder)
