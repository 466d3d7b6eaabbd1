"""Measures steps of models whose layers keep a state, natively and in transformers' code: python -m tools.bench.states

Both are in this process, with the same random weights in bfloat16 and as many threads, and take turns: decodes of one
and of 16 sequences, and a prompt of 512 tokens. Transformers' code has native attention, as it is served where there is
no native step. Drawing tokens is left out. The shapes are like those of published models, with a smaller vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from oaiserve.config import EngineOptions, Quantize
from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.model.states import PartOfStep, States
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.native import native_attention, native_decoder, with_native_cache
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tools.bench import machine
from tools.bench.step import BLOCK_SIZE, Point
from tools.bench.table import spread
from tools.engine_load import greedy
from tools.markdown import as_markdown, publish

LOADS = {
    "one sequence": Point(1, 1, 192),
    "16 sequences": Point(16, 1, 192),
    "a prompt of 512": Point(1, 512, 512),
}
NUM_BLOCKS = max(point.num_blocks for point in LOADS.values())
_VOCAB = {"vocab_size": 32_768, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": True}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.5-0.8B": {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    },
    "Granite-4.0-H-350M": {
        "model_type": "granitemoehybrid", "hidden_size": 768, "shared_intermediate_size": 2048, "num_hidden_layers": 32,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 0, "mamba_n_heads": 48,
        "mamba_d_head": 32, "mamba_d_state": 128, "mamba_n_groups": 1, "position_embedding_type": "nope",
        "layer_types": [("linear_attention", "full_attention")[i in (10, 13, 17, 27)] for i in range(32)],
    },
    "LFM2-350M": {
        "model_type": "lfm2", "hidden_size": 1024, "intermediate_size": 6656, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 8, "block_ffn_dim_multiplier": 1.0,
        "layer_types": [("conv", "full_attention")[i in (2, 5, 8, 10, 12, 14)] for i in range(16)],
    },
    "Kimi-Linear, 4 layers, 32 experts": {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 32, "linear_head_dim": 128, "linear_num_heads": 32,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64,
        "num_experts": 32, "n_routed_experts": 32, "num_experts_per_tok": 8, "moe_intermediate_size": 1024,
        "n_shared_experts": 1, "first_k_dense_replace": 1,
        "layer_types": [("linear_attention", "full_attention")[i == 3] for i in range(4)],
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS), help="default: all")
    add("--layers", type=int, help="so many layers of each model (default: all)")
    add("--quantize", default="none", choices=("none", "int8"), help="the weights of the native step, as the server's")
    add("--rounds", type=int, default=5, help="of each step, in turns (default 5)")
    add("--seconds", type=float, default=0.5, help="time for each step in a round (default 0.5)")
    add("--parts", action="store_true", help="print where the time of native steps goes")
    add("--json", type=Path, help="write the results there")
    add("--markdown", type=Path, help="write the table there, between the markers of states")
    add("--show", type=Path, metavar="JSON", help="measure nothing; show these results")
    arguments = parser.parse_args()
    results = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments)
    publish(arguments, "states", results, report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    times = {name: measure_model(name, arguments) for name in arguments.models}
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "ms": times}


@torch.inference_mode()
def measure_model(name: str, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Return the ms of each load's step, in transformers' code and natively, by round."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name, arguments.layers), dtype=torch.bfloat16)
    loaded = prepare(model.eval())
    native = native_step(with_native_cache(loaded, EngineOptions()), arguments.quantize)
    attention = native_attention(loaded, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_threads=default_threads())
    eager = EagerExecutor(loaded, attention.caches, attention.prepare)
    states = States(loaded.state_shapes, max(point.num_sequences for point in LOADS.values()), loaded.device)
    times: dict[str, dict[str, list[float]]] = {load: {"eager": [], "native": []} for load in LOADS}
    for _ in range(arguments.rounds):
        for load, point in LOADS.items():
            batch = batch_of(point, loaded, states)
            for kind, executor, num_threads in (("eager", eager, default_threads()), ("native", native, 1)):
                torch.set_num_threads(num_threads)
                if kind == "native":
                    native.forward(batch)  # the first step of a load writes to memory that the system has yet to give
                before = native.durations_seconds()
                times[load][kind].append(step_ms(executor, batch, arguments.seconds))
                if arguments.parts and kind == "native":
                    print(load, parts(before, native.durations_seconds()))
    return times


def config_of(name: str, num_layers: int | None) -> PreTrainedConfig:
    values = _VOCAB | MODELS[name]
    if num_layers is not None:
        values["num_hidden_layers"] = num_layers
        if "layer_types" in values:
            values["layer_types"] = values["layer_types"][:num_layers]
    return AutoConfig.for_model(**values)


def native_step(loaded: LoadedModel, quantize: Quantize) -> NativeDecoder:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "num_threads": default_threads()}
    return native_decoder(loaded, quantize=quantize, **sizes)


def batch_of(point: Point, loaded: LoadedModel, states: States) -> Batch:
    step = Step()
    for index in range(point.num_sequences):
        ids = [(7 * i + 13 * index + 3) % loaded.vocab_size for i in range(point.context)]
        sequence = Sequence(str(index), 0, ids, greedy(1), max_len=point.context + 1)
        sequence.blocks = list(range(index * point.blocks_each, (index + 1) * point.blocks_each))
        step.chunks.append(Chunk(sequence, point.context - point.num_tokens, point.num_tokens))
    batch = build_batch(step, BLOCK_SIZE, loaded.device)
    parts = [PartOfStep(i, chunk.start, chunk.num_tokens) for i, chunk in enumerate(step.chunks)]
    return replace(batch, states=states.of_step(parts))


def step_ms(executor: Executor, batch: Batch, seconds: float) -> float:
    """Return the median of the steps that fit into so many seconds, or the only one, after one to warm up."""
    executor.forward(batch)
    found: list[float] = []
    end = time.perf_counter() + seconds
    while not found or time.perf_counter() < end:
        started = time.perf_counter()
        executor.forward(batch)
        found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(found)


def parts(before: dict[str, float], after: dict[str, float]) -> str:
    """Return the share of each kind of operation in the time of native steps."""
    seconds = {name: after[name] - before[name] for name in after}
    whole = sum(seconds.values())
    return ", ".join(f"{name} {share / whole:.1%}" for name, share in seconds.items())


def report(results: dict[str, Any]) -> str:
    """Return the table: ms of a step, and how many times as fast the native one is, by round."""
    rows = [["shape", "", "transformers' code, ms", "native, ms", "times as fast"]]
    for name, of_model in results["ms"].items():
        for load, times in of_model.items():
            ratios = [a / b for a, b in zip(times["eager"], times["native"], strict=True)]
            rows.append([name, load, spread(times["eager"]), spread(times["native"]), f"**{spread(ratios)}**"])
    head = f"{results['machine']} {results['created']}. Median (least..most) of the rounds."
    return "\n".join([head, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
