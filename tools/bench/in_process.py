"""Measures the engine against OpenVINO GenAI's continuous batching, both without HTTP: python -m tools.bench.in_process

Both have the demo model's weights and compute in bfloat16. OpenVINO GenAI runs in a process of its own, with as many
threads. They take turns with the same random prompts, which are new in each round, and all answers are greedy and of
full length. This server makes no drafts here: answers to random prompts repeat themselves, so drafts would gain more
than on real text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from oaiserve.engine.engine import Engine
from tools.bench import machine, prepare
from tools.bench.table import spread
from tools.bench.workloads import WORKLOADS, Workload
from tools.engine_load import complete, random_prompts
from tools.markdown import add_publishing, as_markdown, number, publish, results_of, write_json
from tools.server_process import exit_on_sigterm

OURS, PEER = "oaiserve", "OpenVINO GenAI"
LOADS = ("W1", "W2", "W5", "W6")  # those without a common prefix whose requests come all at once
GOALS = {"W2": 2.0}
VOCAB_SIZE = 49152
CACHE_GIB = 4

Generate = Callable[[list[list[int]], int], float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", default=list(LOADS), choices=LOADS, help="workloads (default: all)")
    add("--rounds", type=int, default=3, help="default 3")
    add("--quick", action="store_true", help="the short form of each workload")
    add_publishing(parser, "in-process", after="after each workload")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measure)
    publish(arguments, "in-process", results, report(results))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {
        "created": date.today().isoformat(),
        "machine": machine.sentence(),
        "peer": prepare.OPENVINO_GENAI,
        "runs": {},
    }
    settings: dict[str, Any] = {"kv_cache_memory": CACHE_GIB * 2**30, "drafts": "off"}
    with (
        openvino() as (start_seconds, theirs),
        Engine.from_pretrained("demo", **settings) as engine,
    ):
        results["peer_start_seconds"] = start_seconds

        def ours(prompts: list[list[int]], num_tokens: int) -> float:
            return complete(engine, prompts, num_tokens).seconds

        for name in arguments.only:
            workload = WORKLOADS[name].short() if arguments.quick else WORKLOADS[name]
            results["runs"][name] = compare(workload, arguments.rounds, ours, theirs)
            write_json(arguments.json, results)
    return results


def compare(workload: Workload, num_rounds: int, ours: Generate, theirs: Generate) -> dict[str, list[float]]:
    """Return the tokens per second of both in each round, those of prompts and of answers together."""
    rates: dict[str, list[float]] = {OURS: [], PEER: []}
    num_tokens = workload.num_requests * (workload.input_len + workload.output_len)
    for place in range(num_rounds + 1):
        prompts = random_prompts(workload.num_requests, workload.input_len, VOCAB_SIZE, workload.seed(place))
        at_once = workload.concurrency or workload.num_requests
        turns = ((OURS, ours), (PEER, theirs)) if place % 2 else ((PEER, theirs), (OURS, ours))
        for name, generate in turns:
            batches = (prompts[first : first + at_once] for first in range(0, len(prompts), at_once))
            seconds = sum(generate(batch, workload.output_len) for batch in batches)
            if place:  # the first round warms up
                rates[name].append(num_tokens / seconds)
    return rates


@contextmanager
def openvino() -> Iterator[tuple[float, Generate]]:
    """Run OpenVINO GenAI, and yield its time to start and a function that returns the seconds of a batch."""
    python, folder = prepare.openvino() / "bin/python", prepare.openvino_model()
    script = Path(__file__).with_name("generate_openvino.py")
    command = [str(python), str(script), str(folder), str(len(os.sched_getaffinity(0))), str(CACHE_GIB)]
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError("OpenVINO GenAI did not start")
        start_seconds = time.monotonic() - began

        def generate(prompts: list[list[int]], num_tokens: int) -> float:
            print(json.dumps({"prompts": prompts, "max_tokens": num_tokens}), file=process.stdin, flush=True)
            answer = json.loads(process.stdout.readline())  # type: ignore[union-attr]
            if any(len(ids) != num_tokens for ids in answer["token_ids"]):
                raise RuntimeError(f"OpenVINO GenAI has not given {num_tokens} tokens to each prompt")
            return float(answer["seconds"])

        try:
            yield start_seconds, generate
        finally:
            process.stdin.close()


def report(results: dict[str, Any]) -> str:
    rows = [["", "in and out, tokens/s", OURS, PEER, "ratio", "goal"]]
    for name, rates in results["runs"].items():
        ratios = [a / b for a, b in zip(rates[OURS], rates[PEER], strict=True)]
        goal = f"≥ {GOALS[name]:g} times" if name in GOALS else ""
        cells = [spread(rates[OURS]), spread(rates[PEER]), f"**{spread(ratios)}**", goal]
        rows.append([name, WORKLOADS[name].title, *cells])
    head = f"{results['machine']}; {results['peer'].replace('==', ' ')}; {results['created']}."
    start = f"OpenVINO GenAI was ready {number(results['peer_start_seconds'])} s after the start of its process."
    return "\n".join([head, f"Median (least..most) of the rounds. {start}", "", *as_markdown(rows)])


if __name__ == "__main__":
    sys.exit(main())
