"""Shows how well the learnt cost of steps expects them in the six workloads: python -m tools.bench.step_cost

The workloads run in short form on the engine in this process, one after the other. Each step is expected by what the
engine has learnt from the steps before it. Prints markdown: the error of the expected times, as a share of what steps
took without what masks and the machine took.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from pathlib import Path

from oaiserve.engine.engine import Engine
from tools.bench.workloads import WORKLOADS, Workload
from tools.engine_load import complete, random_prompts
from tools.markdown import write_json
from tools.server_process import exit_on_sigterm

VOCAB_SIZE = 32000  # ids that every model of the bench has


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a GGUF file (default: demo)")
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--requests", type=int, help="most requests of a workload (default: those of its short form)")
    parser.add_argument("--json", type=Path, help="write the errors there, and the cost in the end")
    arguments = parser.parse_args()
    exit_on_sigterm()
    found: dict[str, list[float]] = {}
    with Engine.from_pretrained(arguments.model, drafts="off") as engine:
        complete(engine, random_prompts(1, 16, VOCAB_SIZE), 8)
        engine.take_steps()
        for name in arguments.only:
            found[name] = run(engine, WORKLOADS[name].short(), arguments.requests)
        cost = None if engine.step_cost is None else asdict(engine.step_cost)
    print("| workload | steps | median error | p95 |\n|---|---|---|---|")
    for name, errors in found.items():
        print(row(name, WORKLOADS[name].title, errors))
    write_json(arguments.json, {"errors": found, "cost": cost})


def run(engine: Engine, workload: Workload, most: int | None) -> list[float]:
    """Run a workload, and return the errors of its steps of which something was expected."""
    number = min(workload.num_requests, most or workload.num_requests)
    prefix = random_prompts(1, workload.prefix_len, VOCAB_SIZE, seed=workload.seed(1))[0]
    prompts = [[*prefix, *own] for own in random_prompts(number, workload.input_len, VOCAB_SIZE, workload.seed(0))]
    gap_seconds = 1 / workload.rate if workload.rate else 0.0
    complete(engine, prompts, workload.output_len, clients=workload.concurrency, gap_seconds=gap_seconds)
    return [step.cost_error for step in engine.take_steps() if step.cost_error is not None]


def row(name: str, title: str, errors: list[float]) -> str:
    if len(errors) < 2:
        return f"| {name}: {title} | {len(errors)} | | |"
    p95 = statistics.quantiles(errors, n=20)[-1]
    return f"| {name}: {title} | {len(errors)} | {statistics.median(errors):.1%} | {p95:.1%} |"


if __name__ == "__main__":
    main()
