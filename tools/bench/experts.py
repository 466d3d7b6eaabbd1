"""Measures steps of a mixture of experts, native and in transformers' code, in turns: python -m tools.bench.experts

The model has random weights. All have native attention and the same batches, so what differs is everything else:
experts, routers, and the other operations of a layer. With `--shape gpt_oss`, a native step with experts in MXFP4 is
measured, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import GptOssConfig, PreTrainedConfig, Qwen3MoeConfig

from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.blocks import MXFP4, Blocks, ExpertBlocks
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.describe import describe
from oaiserve.engine.model.cpu.library import Library
from oaiserve.engine.model.cpu.native import NativeDecoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.executor import Executor
from oaiserve.engine.model.spec import LoadedModel
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.start.native import native_attention, transformers_logits
from oaiserve.engine.start.prepare import prepare
from oaiserve.engine.step import Chunk, Step
from tests.models.decoders import random_model
from tests.models.gguf_files import random_blocks
from tools.bench import machine
from tools.bench.table import spread
from tools.engine_load import greedy
from tools.markdown import add_publishing, as_markdown, publish, results_of

BLOCK_SIZE = 16
CONTEXT = 192
STEPS = ((1, 1), (8, 1), (64, 1), (1, 512))  # sequences, and tokens of each
SHAPES: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=32000, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
        head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=768, norm_topk_prob=True,
    ),
    # As wide as the published models, with fewer experts, layers and tokens.
    "gpt_oss": GptOssConfig(
        vocab_size=8000, hidden_size=2880, intermediate_size=2880, num_hidden_layers=2, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=16, num_experts_per_tok=4, sliding_window=128,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3_moe", help="of the model (default qwen3_moe)")
    add("--rounds", type=int, default=7, help="of each step, in turns (default 7)")
    add_publishing(parser, "experts, or experts-gpt_oss")
    arguments = parser.parse_args()
    results = results_of(arguments, lambda asked: measure(asked.shape, asked.rounds))
    marker = "experts" if arguments.shape == "qwen3_moe" else f"experts-{arguments.shape}"
    publish(arguments, marker, results, report(results))


@torch.inference_mode()
def measure(shape: str, num_rounds: int) -> dict[str, Any]:
    loaded, threads = prepare(random_model(SHAPES[shape], dtype=torch.bfloat16)), default_threads()
    sizes = {"num_blocks": 64 * (CONTEXT // BLOCK_SIZE) + 64, "block_size": BLOCK_SIZE, "num_threads": threads}
    attention = native_attention(loaded, **sizes)
    # Not compared with each other: in bfloat16 random routers choose other experts for tokens that like two as much.
    _, parameters = transformers_logits(loaded, BLOCK_SIZE)
    decoder = describe(loaded, parameters)
    executors: dict[str, Executor] = {"native": NativeDecoder(Library(loaded.dtype), decoder, **sizes)}
    if shape == "gpt_oss":
        decoder = describe(loaded, parameters, _mxfp4_blocks(loaded))
        executors["native, MXFP4"] = NativeDecoder(Library(loaded.dtype, "blocks"), decoder, **sizes)
    executors["transformers"] = EagerExecutor(loaded, attention.caches, attention.prepare)
    found = []
    for num_sequences, num_tokens in STEPS:
        batch = build_batch(_step(num_sequences, num_tokens, loaded.vocab_size), BLOCK_SIZE, loaded.device)
        times: dict[str, list[float]] = {name: [] for name in executors}
        for round_number in range(num_rounds + 1):
            for name, executor in executors.items():
                torch.set_num_threads(threads if name == "transformers" else 1)
                seconds = _seconds(executor.forward, batch)
                if round_number:  # the first one warms up
                    times[name].append(seconds * 1e3)
        found.append({"sequences": num_sequences, "tokens": num_tokens, "ms": times})
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "steps": found}


def _mxfp4_blocks(loaded: LoadedModel) -> dict[str, ExpertBlocks]:
    """Return random numbers of MXFP4 in place of the weights of a gpt-oss's experts."""
    rng, blocks = np.random.default_rng(0), dict[str, ExpertBlocks]()
    for name, parameter in loaded.model.named_parameters():
        if parameter.dim() == 3:
            experts, k, n = parameter.shape
            parts = 2 if "gate_up" in name else 1
            data = [random_blocks(rng, Kind.MXFP4, n, k) for _ in range(experts)]
            blocks[name] = [tuple(Blocks(rows, MXFP4, np.arange(n)[i::parts]) for i in range(parts)) for rows in data]
    return blocks


def _seconds(forward: Callable[[Batch], torch.Tensor], batch: Batch) -> float:
    """Return the median of three steps."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        forward(batch)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _step(num_sequences: int, num_tokens: int, vocab_size: int) -> Step:
    generator, step = random.Random(0), Step()
    context = max(CONTEXT, num_tokens)
    blocks_each = -(-context // BLOCK_SIZE)
    for index in range(num_sequences):
        ids = generator.choices(range(vocab_size), k=context)
        sequence = Sequence(str(index), 0, ids, greedy(1), max_len=context + 1)
        sequence.blocks = list(range(index * blocks_each, (index + 1) * blocks_each))
        step.chunks.append(Chunk(sequence, context - num_tokens, num_tokens))
    return step


def report(results: dict[str, Any]) -> str:
    names = [name for name in results["steps"][0]["ms"] if name != "transformers"]
    ratios = ["ratio" if len(names) == 1 else f"ratio: {name}" for name in names]
    times = [*(f"{name}, ms" for name in names), "transformers' code, ms"]
    rows = [["sequences", "tokens of each", *times, *ratios]]
    for step in results["steps"]:
        others = step["ms"]["transformers"]
        cells = [spread(step["ms"][name]) for name in (*names, "transformers")]
        for name in names:
            quotients = [other / own for own, other in zip(step["ms"][name], others, strict=True)]
            cells.append(f"**{spread(quotients)}**")
        rows.append([str(step["sequences"]), str(step["tokens"]), *cells])
    about = f"{results['machine']}; {results['created']}. Median (least..most) of the rounds."
    return "\n".join([about, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
