"""Shows how well the learnt cost of steps expects them in the six workloads: python -m tools.bench.step_cost

The workloads run in short form on the engine in this process, one after the other, and then all of them again. Each
step is expected by what the engine has learnt from the steps before it, so the first time is about steps that were not
seen before. Prints markdown: the error of the expected times, as a share of what steps took without what masks and the
machine took; and beside it the spread, which no cost could expect: how far steps are from the median of those around
them that computed as many tokens of as many sequences.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from oaiserve.engine.engine import Engine
from oaiserve.facts.record import StepRecord
from tools.bench.workloads import WORKLOADS, Workload
from tools.engine_load import complete, random_prompts
from tools.markdown import as_markdown, write_json
from tools.server_process import exit_on_sigterm

VOCAB_SIZE = 32000  # ids that every model of the bench has
AROUND, LEAST_EQUAL = 6, 4  # steps before a step, and as many after; so many of them have to be equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a folder, a hub id or a GGUF file (default: demo)")
    parser.add_argument("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--json", type=Path, help="write the errors there, and the cost in the end")
    arguments = parser.parse_args()
    exit_on_sigterm()
    found: list[dict[str, list[StepRecord]]] = [{}, {}]
    with Engine.from_pretrained(arguments.model, drafts="off") as engine:
        complete(engine, random_prompts(1, 16, VOCAB_SIZE), 8)
        engine.take_steps()
        for number, steps in enumerate(found):
            for name in arguments.only:
                steps[name] = run(engine, WORKLOADS[name].short(), number)
        cost = None if engine.step_cost is None else asdict(engine.step_cost)
    shares = {}
    for name in arguments.only:
        errors = ([one.cost_error for one in steps[name] if one.cost_error is not None] for steps in found)
        shares[name] = [*errors, [*spread(found[1][name])]]
    rows = [["workload", "steps", "first, median error", "p95", "again, median error", "p95", "spread", "p95"]]
    for name, columns in shares.items():
        figures = [figure for column in columns for figure in middle_and_p95(column)]
        rows.append([f"{name}: {WORKLOADS[name].title}", str(len(found[1][name])), *figures])
    print("\n".join(as_markdown(rows)))
    write_json(arguments.json, {"errors": shares, "cost": cost})


def run(engine: Engine, workload: Workload, round_number: int) -> list[StepRecord]:
    """Run a workload with the prompts of a round, and return its steps."""
    prefix = random_prompts(1, workload.prefix_len, VOCAB_SIZE, seed=workload.seed(2 * round_number + 1))[0]
    own_prompts = random_prompts(workload.num_requests, workload.input_len, VOCAB_SIZE, workload.seed(2 * round_number))
    gap_seconds = 1 / workload.rate if workload.rate else 0.0
    prompts = [[*prefix, *own] for own in own_prompts]
    complete(engine, prompts, workload.output_len, clients=workload.concurrency, gap_seconds=gap_seconds)
    return engine.take_steps()


def spread(steps: list[StepRecord]) -> Iterator[float]:
    """Yield how far steps are from the median of equal ones around them, as a share of the time of each."""
    sizes = [(step.kind, step.num_sequences, step.num_tokens) for step in steps]
    for index, step in enumerate(steps):
        around = range(max(0, index - AROUND), min(len(steps), index + AROUND + 1))
        equal_ns = [steps[other].duration_ns for other in around if other != index and sizes[other] == sizes[index]]
        if len(equal_ns) >= LEAST_EQUAL:
            yield abs(statistics.median(equal_ns) / step.duration_ns - 1)


def middle_and_p95(shares: list[float]) -> tuple[str, str]:
    if len(shares) < 2:
        return "", ""
    return f"{statistics.median(shares):.1%}", f"{statistics.quantiles(shares, n=20)[-1]:.1%}"


if __name__ == "__main__":
    main()
