"""Measures the engine thread's time in a step, with doubles for the device: python -m tools.host_time

In the first table, the double computes one step after the other, beside the host, each in a set time. Some rows may
have a penalty, so that their draw needs the ids of the step before. Printed are the host's time per step, and how long
the device waits for it. In the second table, replayed graphs do nothing, and the time is that of the runner to launch a
step: with sequences of equal lengths, with a long one among them, and with prompts beside decodes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import torch

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.model.batch import Batch
from oaiserve.engine.model.gpu.block_tables import BlockTables
from oaiserve.engine.model.gpu.decode_forwards import DecodeForwards, Run
from oaiserve.engine.model.gpu.graphs import DecodeGraphs
from oaiserve.engine.model.gpu.prompt_graphs import MOST_PROMPTS, PromptGraphs
from oaiserve.engine.model.runner import ModelRunner
from oaiserve.engine.model.sampling.draw_rows import SampledIds
from oaiserve.engine.model.spec import ModelSpec
from oaiserve.engine.request import TERMINAL, Event, Request, SamplingParams, TokenPrompt
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.step import Chunk, ChunkResult, Masks, Step, StepResult
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.facts.record import HostPart, StepKind
from oaiserve.facts.times import monotonic_ns
from tests.models.decoders import byte_tokenizer

BLOCK_SIZE = 16
TOKENS = 200  # of each answer
TILE_TOKENS = 32  # of a prompt, that a program of a kernel computes at a time


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
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=double,
            num_blocks=num_sequences * 32,
            max_model_len=512,
            vocab_size=256,
        ),
        EngineOptions(max_running=num_sequences, max_step_tokens=num_sequences * 16, prefix_cache=False),
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


def launch_us(lengths: list[int], prompt_lengths: list[int], num_steps: int) -> float:
    """Return the median time to launch a step, in which sequences of these lengths decode and prompts are computed."""
    spec = make_spec()
    tables = BlockTables(len(lengths) + len(prompt_lengths), (1 << 18) // BLOCK_SIZE, BLOCK_SIZE, spec.device)
    logits = torch.zeros(max(len(lengths), MOST_PROMPTS), spec.vocab_size)

    def forward(batch: Batch) -> torch.Tensor:
        if batch.tiles is not None:
            batch.tiles.of(TILE_TOKENS)  # as attention does, so that each step brings its own
        return logits[: len(batch.logits_rows)]

    def capture(run: Run) -> Run:
        run()
        return lambda: None

    forwards = DecodeForwards(forward, capture, spec, tables, sizes=[len(lengths)], max_model_len=spec.max_model_len)
    decodes = DecodeGraphs(forwards, NoSampler(), capture, block_size=BLOCK_SIZE)
    prompts = PromptGraphs(forward, capture, spec, tables, sizes=[2048], block_size=BLOCK_SIZE)
    runner = ModelRunner(
        Nothing(),  # type: ignore[arg-type]
        spec.device,
        BLOCK_SIZE,
        graphs=decodes,
        prompt_graphs=prompts,
        tables=tables,
    )
    running = [make_sequence(length, length + num_steps + 1) for length in lengths]
    times_us = []
    for number in range(num_steps):
        step = Step([Chunk(one, length + number, 1) for one, length in zip(running, lengths, strict=True)])
        step.chunks += [Chunk(make_sequence(length, length), 0, length) for length in prompt_lengths]
        began_ns = monotonic_ns()
        runner.launch(step)
        times_us.append((monotonic_ns() - began_ns) / 1e3)
    return statistics.median(times_us[2:])


class NoSampler:
    """Draws what has been drawn before."""

    def take_best(self, logits: torch.Tensor, out: SampledIds | None = None) -> SampledIds:
        assert out is not None
        return out

    def draw(self, *_: Any, out: SampledIds | None = None, **__: Any) -> SampledIds:
        assert out is not None
        return out


def make_spec() -> ModelSpec:
    return ModelSpec(
        name="double",
        device=torch.device("cpu"),
        dtype=torch.float32,
        vocab_size=256,
        max_model_len=1 << 18,
        eos_token_ids=frozenset(),
        default_params={},
        kv_shapes={},
    )


def make_sequence(num_tokens: int, num_slots: int) -> Sequence:
    """Return a greedy sequence with blocks for `num_slots` tokens."""
    made = Sequence("r", 0, [0] * num_slots, SamplingParams(temperature=0.0), max_len=num_slots + 1)
    made.num_tokens = num_tokens
    made.blocks = list(range(-(-num_slots // BLOCK_SIZE)))
    return made


class Nothing:
    """An executor that is not asked."""

    is_exact = False


LAUNCHES: dict[str, tuple[list[int], list[int]]] = {
    "256 of 300 tokens": ([300] * 256, []),
    "one of 131,072 and 255 of 300": ([131_072] + [300] * 255, []),
    "64 of 300": ([300] * 64, []),
    "64 of 300, and a prompt of 200": ([300] * 64, [200]),
    "64 of 300, and 4 prompts of 500": ([300] * 64, [500] * 4),
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
    print("\n| sequences that decode | to launch the step |\n|---|---|")
    for name, (lengths, prompt_lengths) in LAUNCHES.items():
        values = [launch_us(lengths, prompt_lengths, num_steps=100) for _ in range(arguments.repeats)]
        print(f"| {name} | {statistics.median(values):.0f} µs ({min(values):.0f} to {max(values):.0f}) |")


if __name__ == "__main__":
    main()
