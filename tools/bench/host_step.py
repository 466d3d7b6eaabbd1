"""Measures what a step of decodes costs the engine's thread: python -m tools.bench.host_step

The engine, its runner and step graphs are those of a GPU, on a device that computes nothing: a replayed graph does
nothing, and copies stay on the host. So CUDA's own calls are missing, about eight a step. Each sequence is a request of
its own, and each of its tokens leaves at once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from loadtest.intervals import percentile
from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.engine_parts import EngineParts
from oaiserve.engine.executors.runner import ModelRunner
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.start.started import Started, assemble
from oaiserve.engine.stepper import Stepper
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.interpreter import end_load, switch_often
from oaiserve.plugins.cuda.executor.block_tables import BlockTables
from oaiserve.plugins.cuda.executor.step_graphs import StepGraphs
from oaiserve.plugins.cuda.executor.step_sizes import Size
from oaiserve.plugins.cuda.executor.token_counts import DeviceCounts
from oaiserve.runtime import THREADS
from tests.models.decoders import byte_tokenizer
from tools.engine_load import complete, greedy, random_prompts
from tools.gpu.sections import Target
from tools.gpu.workload import files_of
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

BLOCK_SIZE = 16
MODEL_LEN = 2048
DRAWN = 68  # the id that is drawn for each row: a letter
CPU = torch.device("cpu")
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}
LOADS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": SAMPLED,
    "sampled, repetition penalty": {**SAMPLED, "repetition_penalty": 1.05},
    "sampled, presence penalty": {**SAMPLED, "presence_penalty": 1.5},
}


class NoExecutor:
    """Computes nothing."""

    is_exact = False
    weight_bytes = 1

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def forward(self, batch: Batch) -> torch.Tensor:
        return torch.zeros(len(batch.logits_rows), self._vocab_size)


def _draw(
    logits: torch.Tensor, parameters: torch.Tensor, seeds: torch.Tensor, out: Sequence[torch.Tensor], edits: Any
) -> None:
    """Write the results of a captured step, which all of its replays have: an id, and that logits were finite."""
    out[0].fill_(DRAWN)
    out[1].fill_(1)


def _sample_ids(logits: torch.Tensor, rows: Sequence[Any], edits: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((len(rows),), DRAWN), torch.ones(len(rows), dtype=torch.bool)


def _capture(run: Any) -> Any:
    run()
    return lambda: None


@contextmanager
def engine_of(most: int) -> Iterator[Engine]:
    """Yield an engine for this many sequences, whose device computes nothing."""
    with files_of("gpt2-124m", Target(CPU, True), torch.float32) as files:
        spec = replace(files.spec, max_model_len=MODEL_LEN)
    num_blocks = most * (MODEL_LEN // BLOCK_SIZE)
    executor: Any = NoExecutor(spec.vocab_size)
    tables = BlockTables.with_room(most, MODEL_LEN, BLOCK_SIZE, CPU)
    sizes = [Size(rows, 0) for rows in sorted({most, *(2**n for n in range(most.bit_length()))})]
    sampler: Any = SimpleNamespace(draw=_draw)
    counts = DeviceCounts(tables, spec.vocab_size)
    of_graphs = {"sizes": sizes, "block_size": BLOCK_SIZE, "counts": counts}
    graphs = StepGraphs(executor.forward, sampler, _capture, spec, tables, **of_graphs)
    of_runner = {"graphs": graphs, "tables": tables, "counts": counts}
    runner = ModelRunner(executor, CPU, BLOCK_SIZE, sample_ids=_sample_ids, **of_runner)
    runner.is_asynchronous = True
    options = EngineOptions(max_running=most, kv_blocks=num_blocks, block_size=BLOCK_SIZE)
    sizes_of_model = {"block_bytes": 1, "weight_bytes": 1}
    started = Started(spec, {}, runner, num_blocks, MODEL_LEN, 2048, counts_tokens=True, **sizes_of_model)
    model = assemble(started, Tokenizer(byte_tokenizer(spec.vocab_size)), options, THREADS)
    with Engine(EngineParts.of(model, options)) as engine:
        yield engine


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the median CPU time of the engine's thread in a step of all sequences, in µs, of each turn with each load
    and number of sequences."""
    taken: list[int] = []
    turn = Stepper.turn

    def timed(self: Stepper) -> bool:
        began_ns = time.thread_time_ns()
        try:
            return turn(self)
        finally:
            taken.append(time.thread_time_ns() - began_ns)

    found: dict[str, dict[str, list[float]]] = {load: {} for load in arguments.loads}
    with patch.object(Stepper, "turn", timed):
        for count in arguments.sequences:
            with engine_of(count) as engine:
                for turn_number in range(1 + arguments.turns):
                    for load in arguments.loads:
                        taken.clear()
                        params = replace(greedy(arguments.tokens), **LOADS[load])
                        prompts = random_prompts(count, arguments.prompt_tokens, 256)
                        complete(engine, prompts, arguments.tokens, params=params)
                        of_all = sorted(taken[len(taken) // 4 : -len(taken) // 4])
                        if turn_number:
                            found[load].setdefault(str(count), []).append(percentile(of_all, 50) / 1e3)
    return {"cpu_us_per_step": found}


def report(results: dict[str, Any]) -> str:
    rows = [("draws", "sequences", "µs of CPU time per step: least turn", "median turn", "least per token")]
    for load, by_count in results["cpu_us_per_step"].items():
        for count, times in by_count.items():
            least = min(times)
            rows.append((load, count, number(least), number(statistics.median(times)), number(least / int(count))))
    return "\n".join(as_markdown(rows))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", nargs="+", type=int, default=[64, 128, 256], help="default: 64 128 256")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer (default 100)")
    parser.add_argument("--prompt-tokens", type=int, default=40, help="of each prompt (default 40)")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS], help="default: all")
    parser.add_argument("--turns", type=int, default=5, help="of each number of sequences (default 5)")
    add_publishing(parser, "host-step")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    switch_often()  # A server does so, and so does `end_load`.
    end_load()
    publish(arguments, "host-step", results := results_of(arguments, measure), report(results))


if __name__ == "__main__":
    main(sys.argv[1:])
