"""Measures steps of a mixture of experts, native and in transformers' code, in turns: python -m tools.bench.experts

The model has random weights. Both have native attention and the same batches, so what differs is everything else:
experts, routers, and the other operations of a layer.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig

from oaiserve.engine.model.batch import Batch, build_batch
from oaiserve.engine.model.cpu.cores import default_threads
from oaiserve.engine.model.cpu.start import native_attention, native_decoder
from oaiserve.engine.model.eager import EagerExecutor
from oaiserve.engine.model.load import prepare
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step
from tools.bench import machine
from tools.bench.table import spread
from tools.engine_load import greedy
from tools.markdown import as_markdown, publish
from tools.random_models import random_model

BLOCK_SIZE = 16
CONTEXT = 192
STEPS = ((1, 1), (8, 1), (64, 1), (1, 512))  # sequences, and tokens of each
SHAPE = Qwen3MoeConfig(
    vocab_size=32000, hidden_size=1024, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
    head_dim=64, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="of each step, in turns (default 7)")
    add("--json", type=Path, help="write the results there")
    add("--markdown", type=Path, help="write the table there, between the markers of experts")
    add("--show", type=Path, metavar="JSON", help="measure nothing; show these results")
    arguments = parser.parse_args()
    results = json.loads(arguments.show.read_text()) if arguments.show else measure(arguments.rounds)
    publish(arguments, "experts", results, report(results))


@torch.inference_mode()
def measure(num_rounds: int) -> dict[str, Any]:
    loaded, threads = prepare(random_model(SHAPE, dtype=torch.bfloat16)), default_threads()
    sizes = {"num_blocks": 64 * (CONTEXT // BLOCK_SIZE) + 64, "block_size": BLOCK_SIZE, "num_threads": threads}
    native = native_decoder(loaded, **sizes)
    attention = native_attention(loaded, **sizes)
    eager = EagerExecutor(loaded, attention.caches, attention.prepare)
    found = []
    for num_sequences, num_tokens in STEPS:
        batch = build_batch(_step(num_sequences, num_tokens, loaded.vocab_size), BLOCK_SIZE, loaded.device)
        times: dict[str, list[float]] = {"native": [], "transformers": []}
        for round_number in range(num_rounds + 1):
            for name, executor, num_threads in (("native", native, 1), ("transformers", eager, threads)):
                torch.set_num_threads(num_threads)
                seconds = _seconds(executor.forward, batch)
                if round_number:  # the first one warms up
                    times[name].append(seconds * 1e3)
        found.append({"sequences": num_sequences, "tokens": num_tokens, "ms": times})
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "steps": found}


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
    rows = [["sequences", "tokens of each", "native, ms", "transformers' code, ms", "ratio"]]
    for step in results["steps"]:
        native, other = step["ms"]["native"], step["ms"]["transformers"]
        ratios = [b / a for a, b in zip(native, other, strict=True)]
        cells = [spread(native), spread(other), f"**{spread(ratios)}**"]
        rows.append([str(step["sequences"]), str(step["tokens"]), *cells])
    head = f"{results['machine']}; {results['created']}. Median (least..most) of the rounds."
    return "\n".join([head, "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
