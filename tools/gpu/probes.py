"""Probes the kernels of models as the server's start does, eight at a time: two layers with real widths, one case for
each kind of head, group, cache, weight and state. And three small ones under NVIDIA's memory checker."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from msgspec.structs import asdict
from transformers import AutoConfig, PreTrainedConfig

from oaiserve.checkpoints.load_errors import named
from oaiserve.config import EngineOptions
from oaiserve.engine.start.described import Described
from oaiserve.plugins.cuda.start.child import COMMAND, Order, probed
from oaiserve.plugins.cuda.start.comparison import difference_from_plain
from oaiserve.plugins.cuda.start.features import BY_TORCH, by_options
from oaiserve.plugins.cuda.start.on_gpu import graphs_of
from oaiserve.plugins.cuda.start.probe import first_difference, first_layers
from tests.models.decoders import random_model
from tests.models.packed import Packing, write_checkpoint
from tests.models.small_configs import config_of
from tests.plugins.cuda.executor.step_runs import Model, run_again
from tests.plugins.cuda.start.ready import ready_model
from tools.gpu.models import described_on, sensitive
from tools.gpu.sections import Target
from tools.gpu.side_by_side import NO_NUMBERS, TOGETHER, checked
from tools.gpu.worker import LAST_LINES
from tools.gpu.workload import model_folder, with_options

AT_ONCE = 8
LIMIT_SECONDS = 150.0  # for one case, whose kernels are compiled beside those of others
CHECKER_LIMIT_SECONDS = 200.0
CHECKER = "/usr/local/cuda/bin/compute-sanitizer"


@dataclass(frozen=True, slots=True)
class Case:
    """A model type with its sizes, how its matrices are stored, and options of the start."""

    family: str
    sizes: dict[str, Any] = field(default_factory=dict)
    packing: Packing | str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def engine_options(self, dtype: str) -> EngineOptions:
        return EngineOptions(dtype=dtype, max_running=64, **TOGETHER, **self.options)

    def config(self, *, is_small: bool) -> PreTrainedConfig:
        """Return a configuration of two layers with real widths, or one of a small model with other sizes."""
        if is_small:
            return config_of(self.family, **self.sizes)
        return sensitive(AutoConfig.for_model(self.family, **_FEW | self.sizes))


_FEW = {"num_hidden_layers": 2, "vocab_size": 32_768}
_ADAPTERS = {"lora_dir": Path("unread")}
_AWQ = Packing("awq", group_size=128)
_WIDE = {"num_attention_heads": 32, "num_key_value_heads": 8}
_LLAMA_1B = {**_WIDE, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
_LLAMA_8B = {**_WIDE, "hidden_size": 4096, "intermediate_size": 14_336, "head_dim": 128}
_GEMMA_2 = {"hidden_size": 3584, "intermediate_size": 14_336, "num_attention_heads": 16, "num_key_value_heads": 8}
_GEMMA_3 = {"hidden_size": 2560, "intermediate_size": 10_240, "num_attention_heads": 8, "num_key_value_heads": 4}
_WINDOW_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}
_QWEN_MOE = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
}
_DEEPSEEK = {
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
# Those that compile or compute the longest come first.
CASES = {
    "Gemma 4 E4B: heads of 256 and 512 in groups of 4": Case(
        "gemma4_text", {**_GEMMA_3, **_WINDOW_FIRST, "num_key_value_heads": 2, "vocab_size_per_layer_input": 32_768}
    ),
    "Gemma 4 31B: heads of 512 in groups of 8": Case(
        "gemma4_text",
        {
            **_WINDOW_FIRST,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "Gemma 2 9B: heads of 256, windows, softcaps": Case("gemma2", _GEMMA_2),
    "gpt-oss 20B: MXFP4, sinks, heads of 64 in groups of 8": Case("gpt_oss", {"num_local_experts": 32}, "mxfp4"),
    "Qwen3-Next 80B: states and 64 experts": Case(
        "qwen3_next", {"num_experts": 64, "layer_types": ["linear_attention", "full_attention"]}
    ),
    "Bamba 9B: states": Case("bamba", {"attn_layer_indices": [1]}),
    "Qwen3 30B A3B: 128 experts": Case("qwen3_moe", {**_QWEN_MOE, "num_experts": 128}),
    "Llama 3.1 8B: adapters, heads of 128": Case("llama", _LLAMA_8B, options=_ADAPTERS),
    "Llama 3.1 8B: AWQ": Case("llama", _LLAMA_8B, _AWQ),
    "Llama 3.1 8B: FP8": Case("llama", _LLAMA_8B, "fp8"),
    "Llama 3.1 8B: FP8 by row": Case("llama", _LLAMA_8B, options={"quantize": "fp8"}),
    "Llama 3.1 8B: GPTQ in any order": Case("llama", _LLAMA_8B, replace(_AWQ, layout="gptq", has_act_order=True)),
    "Llama 3.1 8B: GPTQ in 8 bits": Case("llama", _LLAMA_8B, replace(_AWQ, layout="gptq", bits=8)),
    "Qwen3 30B A3B: AWQ of 16 experts": Case("qwen3_moe", {**_QWEN_MOE, "num_experts": 16}, _AWQ),
    "Qwen3 8B: cache in FP8": Case(
        "qwen3",
        {"hidden_size": 4096, "intermediate_size": 12_288, **_WIDE},
        options={"kv_cache_dtype": "fp8"},
    ),
    "Llama 3.2 1B: cache in FP8, heads of 64": Case("llama", _LLAMA_1B, options={"kv_cache_dtype": "fp8"}),
    "DeepSeek V2 Lite: keys of 192, values of 128": Case("deepseek_v2", _DEEPSEEK),
    "Gemma 3 4B: AWQ, windows, norms of heads": Case("gemma3_text", {**_GEMMA_3, **_WINDOW_FIRST}, _AWQ),
    "Falcon's 71 heads on one": Case(
        "llama",
        {"hidden_size": 4544, "intermediate_size": 18_176, "num_attention_heads": 71, "num_key_value_heads": 1},
    ),
    "Phi-3 mini: heads of 96 in groups of 1, windows": Case("phi3", {"sliding_window": 300}),
    "Phi-2: heads of 80, partly rotated": Case("phi", {"hidden_size": 2560, "intermediate_size": 10_240}),
    "LFM2: convolutions, adapters": Case(
        "lfm2", {**_LLAMA_1B, "layer_types": ["conv", "full_attention"]}, options=_ADAPTERS
    ),
    "Llama 3.2 1B: its whole vocabulary": Case("llama", {**_LLAMA_1B, "vocab_size": 128_256}),
    "GPT-2 124M: positions, biases": Case("gpt2", {"bos_token_id": 1, "eos_token_id": 2}),
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Cases that are small enough for a run on a CPU
TINY_CASES = {
    "Gemma 2": Case("gemma2"),
    "Llama, AWQ": Case("llama", {"intermediate_size": 128}, Packing("awq")),
    "Qwen3 with experts": Case("qwen3_moe", _MOE),
    "Bamba, with states": Case("bamba"),
}
# Where each tensor has memory of its own, there are no graphs.
_NO_GRAPHS = {"cuda_graph": False}
SMALL_CASES = {
    "Gemma 2, adapters": Case("gemma2", options=_NO_GRAPHS | _ADAPTERS),
    "Llama, AWQ, cache in FP8": Case(
        "llama", {"intermediate_size": 128}, Packing("awq"), _NO_GRAPHS | {"kv_cache_dtype": "fp8"}
    ),
    "Qwen3-Next, with states and experts": Case("qwen3_next", options=_NO_GRAPHS),
}


def run(target: Target) -> Iterator[dict[str, Any]]:
    """Probe models with real widths, or tiny ones on a CPU."""
    cases = TINY_CASES if target.quick else CASES
    yield from checked(
        list(cases), f"{__name__}:check", target, at_once=2 if target.quick else AT_ONCE, limit_seconds=LIMIT_SECONDS
    )


def check(target: Target, name: str) -> dict[str, Any]:
    """Return whether kernels and graphs compute a case as plain torch does. If they do not, without graphs, too."""
    case = {**CASES, **SMALL_CASES, **TINY_CASES}[name]
    on_cpu = target.device.type == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16
    options = case.engine_options(str(dtype).removeprefix("torch."))
    config = case.config(is_small=name not in CASES)
    model = with_options(described_on(config, target.device, dtype=dtype, packing=case.packing), options)
    compare = difference_on_cpu if on_cpu else difference_on_gpu
    problem = _problem(compare, model, options)
    if not problem:
        return {"problem": NO_NUMBERS} if target.is_dry else {"equal": True}
    found = {"equal": False, **problem}
    if target.is_gpu:
        found["without_graphs"] = _problem(compare, model, replace(options, cuda_graph=False)) or "equal"
    return found


def _problem(
    compare: Callable[[Described, EngineOptions], str | None], model: Described, options: EngineOptions
) -> dict[str, Any]:
    """Return the problem of a comparison, if it has one, and where it was raised."""
    try:
        problem = compare(model, options)
        return {} if problem is None else {"problem": problem}
    except Exception as error:
        return {"problem": named(error), "log": traceback.format_exc().splitlines()[-LAST_LINES:]}


def difference_on_gpu(model: Described, options: EngineOptions) -> str | None:
    return first_difference(model, options, by_options(options))


def difference_on_cpu(model: Described, options: EngineOptions) -> str | None:
    """Compare doubles of kernels, and of graphs, with plain torch, as `first_difference` does on a GPU."""
    few = first_layers(model)
    own = ready_model(Model(few.spec, few.decoder), has_adapters=options.has_adapters)
    return difference_from_plain(own, graphs_of(own, run_again))


# transformers changes the default dtype of the process while it makes a model, so threads take turns.
_MAKES_MODEL = Lock()


def memory(target: Target) -> Iterator[dict[str, Any]]:
    """Probe small models under NVIDIA's memory checker, if it is installed, as a start does: in a child process."""
    if target.is_dry:
        yield from checked(list(SMALL_CASES), f"{__name__}:check", target, at_once=1, limit_seconds=LIMIT_SECONDS)
        return
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    found = shutil.which("compute-sanitizer") or shutil.which(CHECKER)
    yield {"checker": found or "compute-sanitizer is not installed"}
    checker = () if found is None else (found, "--tool", "memcheck")
    with ThreadPoolExecutor(len(SMALL_CASES)) as pool:
        running = {pool.submit(_probe, case, target.device, checker): name for name, case in SMALL_CASES.items()}
        for ended in as_completed(running):
            yield {running[ended]: ended.result()}


def _probe(case: Case, device: torch.device, checker: tuple[str, ...]) -> dict[str, Any]:
    """Return whether no feature has a problem, and the checker finds none, and what the reasons are."""
    errors: list[str] = []
    with model_folder() as folder, tempfile.TemporaryDirectory() as logs:
        with _MAKES_MODEL:
            write(case, Path(folder), device)
        options = case.engine_options("bfloat16")
        command = (*checker, "--log-file", f"{logs}/%p", *COMMAND) if checker else COMMAND
        asked = by_options(options)
        found = probed(Order(folder, options, str(device), asked), command, CHECKER_LIMIT_SECONDS)
        if checker:
            lines = [line for file in Path(logs).iterdir() for line in file.read_text(errors="replace").splitlines()]
            is_sound = any("ERROR SUMMARY: 0 errors" in line for line in lines)
            errors = [] if is_sound else [*lines[:20], *lines[-1:]] or ["the checker wrote nothing"]
    if found is None:
        return {"equal": False, "problem": "the model could not be started"}
    verdict = found.verdict
    on = sorted(name for name, reason in verdict.items() if not reason)
    problems = {name: why for name, why in verdict.items() if why and not asked[name] and name not in BY_TORCH}
    is_right = not problems and not errors
    return {"equal": is_right, "problems": problems, "on": on, "errors": errors, "ways": asdict(found.ways)}


def write(case: Case, folder: Path, device: torch.device) -> None:
    """Write the files of a small model with random weights, which the device makes if they are not packed."""
    config = case.config(is_small=True)
    model = random_model(config, dtype=torch.bfloat16, device="cpu" if case.packing is not None else device)
    if isinstance(case.packing, Packing):
        write_checkpoint(folder, model, case.packing)
    else:
        model.save_pretrained(folder)
