"""Counts rows of padding and steps without a graph under a load with lengths like ShareGPT's, on a fake GPU.

    python -m tools.gpu.padding [--running N]... [--requests N] [--json FILE] [--markdown FILE] [--show JSON]

The engine schedules as on a GPU. Its steps compute nothing, and count as taking the time that the products and keys of
an 8B take at the rates of an H100, so each run counts the same. The next request comes when one has ended.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

from transformers import LlamaConfig

from oaiserve.engine.executors.cuda.step_graphs import StepGraphs
from oaiserve.engine.executors.cuda.step_sizes import Size
from oaiserve.engine.executors.runner import Launched, ModelRunner
from oaiserve.engine.request import Request, TokenPrompt
from oaiserve.engine.sequences.step import Step, StepResult
from oaiserve.runtime import THREADS
from tests.models.decoders import SMALL
from tools.engine_load import greedy
from tools.gpu.fake_device import FAKE, fake_device
from tools.gpu.models import described_on
from tools.gpu.schedule import events_of
from tools.gpu.sections import Target
from tools.gpu.workload import BLOCK_SIZE, running_engine
from tools.markdown import add_publishing, as_markdown, number, publish, results_of

MARKERS = "padding"
LONGEST = 2048  # tokens of a prompt, and of its answer
PROMPT = (4.6, 1.25)  # of the logarithm of a prompt's length, mean and deviation: a median of 100, a mean of 220
ANSWER = 200  # tokens, mean of an exponential distribution
# Llama 3.1 8B on an H100, see docs/benchmarks.md: weights, operations and keys of a token, and what else a step takes.
WEIGHT_BYTES = 15.0e9
TOKEN_FLOPS = 15.0e9
KEY_BYTES = 131_072
BYTES_PER_SECOND = 2.6e12
FLOPS_PER_SECOND = 700e12
REST_NS = 1.5e6
KINDS = ("decodes", "decodes and prompts", "all")


class Counts:
    """The steps of a run by kind, with what they compute and what their graphs compute."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self.is_counting = True

    def add(self, step: Step, size: Size | None) -> None:
        if not self.is_counting:
            return
        has_prompts = any(chunk.num_tokens > 1 for chunk in step.chunks)
        for kind in (KINDS[has_prompts], "all"):
            counts = self.by_kind[kind]
            counts["steps"] += 1
            counts["rows"] += step.num_tokens
            counts["without_graph"] += size is None
            counts["padding"] += 0 if size is None else size.num_tokens - step.num_tokens


def requests_like_sharegpt(count: int, vocab_size: int, seed: int = 0) -> list[Request]:
    generator = random.Random(seed)
    requests = []
    for index in range(count):
        prompt_len = min(LONGEST, 4 + int(generator.lognormvariate(*PROMPT)))
        answer_len = min(LONGEST, 1 + int(generator.expovariate(1 / ANSWER)))
        prompt = TokenPrompt(generator.choices(range(vocab_size), k=prompt_len))
        requests.append(Request(f"request-{index}", (prompt,), greedy(answer_len)))
    return requests


def counted(running: int, num_requests: int) -> dict[str, Any]:
    """Return what a load of `running` requests at once counts, until no further request waits to be sent."""
    counts = Counts()
    find = StepGraphs.find
    collect = ModelRunner.collect

    def counted_find(self: StepGraphs, step: Step, *adapters: Any) -> Size | None:
        size = find(self, step, *adapters)
        counts.add(step, size)
        return size

    def timed_collect(self: ModelRunner, launched: Launched) -> StepResult:
        return collect(self, launched)._replace(device_ns=device_ns(launched.step), device_gap_ns=0)

    with (
        fake_device(),
        patch.object(StepGraphs, "find", counted_find),
        patch.object(ModelRunner, "collect", timed_collect),
    ):
        model = described_on(LlamaConfig(**SMALL | {"max_position_embeddings": 2 * LONGEST}), FAKE)
        kv_blocks = running * -(-LONGEST // BLOCK_SIZE)
        settings = {"max_running": running, "kv_blocks": kv_blocks, "prefix_cache": False}
        requests = requests_like_sharegpt(num_requests, model.spec.vocab_size)
        with running_engine(model, Target(FAKE, quick=False), **settings) as engine:
            for event in events_of(engine, requests, {}, running, THREADS):
                if getattr(event, "request_id", "") == requests[-1].request_id:
                    counts.is_counting = False
            graphs: Any = engine._parts.model.runner
            num_graphs = graphs._graphs.num_captured
    return {"running": running, "graphs": num_graphs, **counts.by_kind}


def device_ns(step: Step) -> int:
    keys = sum(chunk.end for chunk in step.chunks if chunk.num_tokens == 1)
    products = max(WEIGHT_BYTES / BYTES_PER_SECOND, step.num_tokens * TOKEN_FLOPS / FLOPS_PER_SECOND)
    return int(1e9 * (products + keys * KEY_BYTES / BYTES_PER_SECOND) + REST_NS)


def as_text(results: Mapping[str, Any]) -> str:
    rows = [
        ["at once", "graphs", "steps", "with prompts, %", "rows a step", "padding, % of rows", "without a graph, %"]
    ]
    for load in results["loads"]:
        steps, with_prompts = (Counter(load[kind]) for kind in ("all", "decodes and prompts"))
        rows.append(
            [
                *(f"{load['running']}", f"{load['graphs']}", f"{steps['steps']:,}"),
                *(number(100 * with_prompts["steps"] / steps["steps"]), number(steps["rows"] / steps["steps"])),
                number(100 * steps["padding"] / steps["rows"]),
                number(100 * steps["without_graph"] / steps["steps"]),
            ]
        )
    return "\n".join(as_markdown(rows))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"loads": [counted(running, arguments.requests) for running in arguments.running]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[256], help="requests at once (default 256)")
    parser.add_argument("--requests", type=int, default=2048, help="requests in all (default %(default)d)")
    add_publishing(parser, MARKERS)
    arguments = parser.parse_args(argv)
    results = results_of(arguments, measure)
    publish(arguments, MARKERS, results, as_text(results))


if __name__ == "__main__":
    main()
