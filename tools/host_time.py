"""Measures the engine thread's time in a decode step, with a device double for a model: python -m tools.host_time

The double computes one step after the other, beside the host, each in a set time. Some rows may have a penalty, so that
their draw needs the ids of the step before. Printed are the host's time per step, and how long the device waits for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Request, SamplingParams, TokenPrompt
from oaiserve.engine.step import ChunkResult, Masks, Step, StepResult
from oaiserve.engine.tokenizer import Tokenizer
from oaiserve.record import HostPart, StepKind
from oaiserve.times import monotonic_ns
from tools.random_models import byte_tokenizer

TOKENS = 200  # of each answer


@dataclass(frozen=True, slots=True)
class Launched:
    step: Step
    ends_ns: int


class DeviceDouble:
    """A runner whose device takes `step_ns` for each step, and draws the same token for every row."""

    is_exact = False
    is_asynchronous = True
    kv_version = 0

    def __init__(self, step_ns: int) -> None:
        self._step_ns = step_ns
        self._ends_ns = 0
        self.gaps_ns: list[int] = []  # how long the device waited before each decode step

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Do nothing: no block holds anything."""

    def launch(self, step: Step) -> Launched:
        now_ns = monotonic_ns()
        if all(chunk.num_tokens == 1 for chunk in step.chunks):
            self.gaps_ns.append(max(0, now_ns - self._ends_ns))
        self._ends_ns = max(now_ns, self._ends_ns) + self._step_ns
        return Launched(step, self._ends_ns)

    def draw(self, launched: Launched, masks: Masks | None) -> None:
        """Do nothing: the device draws behind the forward pass that it is still computing."""

    def collect(self, launched: Launched) -> StepResult:
        while (left_ns := launched.ends_ns - monotonic_ns()) > 0:
            if left_ns > 300_000:  # a sleep ends late by some 60 us
                time.sleep((left_ns - 200_000) / 1e9)
        return StepResult([ChunkResult([65] if chunk.max_draws else []) for chunk in launched.step.chunks])


def measure(num_sequences: int, num_waiting_rows: int, step_ns: int) -> dict[str, float]:
    """Return medians over the decode steps of `num_sequences`, of which some need the ids before for their draw."""
    double = DeviceDouble(step_ns)
    engine = Engine(
        tokenizer=Tokenizer(byte_tokenizer()),
        runner=double,
        num_blocks=num_sequences * 32,
        max_model_len=512,
        vocab_size=256,
        options=EngineOptions(max_running=num_sequences, max_step_tokens=num_sequences * 16, prefix_cache=False),
    )
    inbox: SimpleQueue[list[Event]] = SimpleQueue()
    with engine:
        for number in range(num_sequences):
            penalty = {"presence_penalty": 0.5} if number < num_waiting_rows else {}
            params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **penalty)
            engine.submit(Request(str(number), (TokenPrompt([1, 2, 3, number % 256]),), params), inbox.put)
        num_open = num_sequences
        while num_open:
            num_open -= sum(isinstance(event, TERMINAL) for event in inbox.get())
        records = [
            record
            for record in engine.take_steps()
            if record.kind == StepKind.DECODE and record.num_sequences == num_sequences
        ]
    own_ns = [sum(ns for part, ns in record.host_ns.items() if part != HostPart.WAIT) for record in records[2:]]
    starts_ns = [record.started_ns for record in records[2:]]
    return {
        "host_us": statistics.median(own_ns) / 1e3,
        "gap_us": statistics.median(double.gaps_ns[4:]) / 1e3,
        "period_us": statistics.median(b - a for a, b in pairwise(starts_ns)) / 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=3.0, help="what the device takes for a step (default 3)")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print("| rows that need the ids before | host per step | device waits | step to step |\n|---|---|---|---|")
    for num_waiting_rows in (0, 1, arguments.sequences):
        rows = [
            measure(arguments.sequences, num_waiting_rows, int(arguments.step_ms * 1e6))
            for _ in range(arguments.repeats)
        ]
        shown = (
            f"{statistics.median(values):.0f} µs ({min(values):.0f} to {max(values):.0f})"
            for values in ([row[name] for row in rows] for name in ("host_us", "gap_us", "period_us"))
        )
        print(f"| {num_waiting_rows} of {arguments.sequences} | {' | '.join(shown)} |")


if __name__ == "__main__":
    main()
