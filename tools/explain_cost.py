"""Measures what it costs to tell why requests take their time, on an engine in this process:
python -m tools.explain_cost

First the parts: the engine thread's own time for the causes of a step, and a fit of what steps cost. Then the whole:
while sequences of the demo model decode, the causes are taken away and given back in turns of a few steps, the order in
each pair drawn at random. Fits may run beside the steps of either side. Prints markdown; a ratio is the time of a step
with causes to that without, over all pairs, with a 95 % interval by bootstrap.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from threading import Event

from oaiserve.engine.accounts.host_time import HostTime
from oaiserve.engine.accounts.machine_time import MachineTime
from oaiserve.engine.accounts.step_account import StepAccount
from oaiserve.engine.accounts.step_causes import StepCauses
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Chunk, Step, StepResult
from oaiserve.explain.causes import RequestCauses
from oaiserve.explain.step_cost_fit import FitThread, Run, StepCostFit
from tools.engine_load import complete, random_prompts
from tools.paired import Slices, trimmed_interval

VOCAB_SIZE = 32000
STEP_NS = 10_000_000  # of the steps whose parts are measured


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences that decode beside each other, and how many of their steps are a slice."""

    num_sequences: int
    prompt_tokens: int
    answer_tokens: int
    slice_steps: int


LOADS = (Load(1, 128, 1536, 8), Load(64, 128, 512, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="measure the parts only")
    parser.add_argument("--seconds", type=float, default=100, help="time for each load (default 100)")
    arguments = parser.parse_args()
    print_parts()
    if arguments.parts:
        return
    print("\n| sequences | mean time of a step, ratio | median, ratio | pairs | steps | a step without, ms |")
    print("|---|---|---|---|---|---|")
    with Engine.from_pretrained("demo", drafts="off", prefix_cache=False) as engine:
        for load in LOADS:
            slices = in_slices(engine, load, arguments.seconds)
            num_pairs = len(slices.means)
            without_ms = statistics.median(without for _, without in slices.medians) / 1e6
            print(
                f"| {load.num_sequences} | {ratio(slices.means)} | {ratio(slices.medians)} | {num_pairs} | "
                f"{2 * num_pairs * load.slice_steps} | {without_ms:.2f} |",
                flush=True,
            )


def ratio(pairs: list[tuple[float, float]]) -> str:
    return "{:.4f} ({:.4f} to {:.4f})".format(*trimmed_interval(pairs))


def in_slices(engine: Engine, load: Load, seconds: float) -> Slices:
    """Return the times of decode steps with and without causes, of as many answers as are done in this time."""
    switched = SwitchedAccount(engine, load)
    prompts = random_prompts(load.num_sequences, load.prompt_tokens, VOCAB_SIZE)
    complete(engine, prompts, 32)  # so that the cost is known, and native code is warm
    slices = switched.begin()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        complete(engine, prompts, load.answer_tokens)
    switched.end()
    return slices


class SwitchedAccount:
    """Takes the causes away from the account of an engine's steps, and gives them back.

    The engine thread does that itself, between two steps. Only steps count in which all sequences decode, so requests
    begin and end with causes. Those of the steps without are the host's time to them, which nobody reads here.
    """

    def __init__(self, engine: Engine, load: Load) -> None:
        self._account = engine._loop._account
        self._step_ended = self._account.step_ended
        self._causes = self._account._causes
        self._num_sequences = load.num_sequences
        self._slices = Slices(load.slice_steps)

    def begin(self) -> Slices:
        self._account.step_ended = self._switch  # type: ignore[method-assign]
        return self._slices

    def end(self) -> None:
        self._account.step_ended = self._step_ended  # type: ignore[method-assign]
        self._account._causes = self._causes

    def _switch(self, step: Step, result: StepResult, launched_ns: int, ended_ns: int) -> int:
        has_causes = True
        if len(step.chunks) == step.num_tokens == self._num_sequences:
            has_causes = self._slices.ended(ended_ns)
        else:
            self._slices.interrupted()
        self._account._causes = self._causes if has_causes else None
        return self._step_ended(step, result, launched_ns, ended_ns)


def print_parts() -> None:
    """Print what the causes take of the engine thread's own time, by themselves."""
    print("| part | µs |\n|---|---|")
    for title, chunks in parts().items():
        took = step_microseconds(chunks, explain=True) - step_microseconds(chunks, explain=False)
        print(f"| causes of a step with {title} | {took / len(chunks):.2f} |", flush=True)
    print(f"| a fit, twice a second, on a thread of its own | {fit_microseconds():.0f} |", flush=True)


def parts() -> dict[str, list[Chunk]]:
    """Return the chunks of several steps, each in a request of its own."""

    def decoding(number: int) -> list[Chunk]:
        return [Chunk(a_sequence(), 64, 1) for _ in range(number)]

    return {
        "one request": decoding(1),
        "8 requests, for each": decoding(8),
        "64 requests, for each": decoding(64),
        "one request and its draft": [Chunk(a_sequence(), 64, 4, 4, (1, 2, 3))],
        "one prompt": [Chunk(a_sequence(), 0, 64)],
    }


def step_microseconds(chunks: list[Chunk], *, explain: bool) -> float:
    """Return the time that the account of a step takes of the engine thread's own, with handing fits over.

    The steps are accounted for a thousand times as fast as they would run, and then fits would run beside them all the
    time, and take Python's lock. So each fit is waited for, and that is not counted.
    """
    waited, fits, fitted = 0.0, FitThread(), Event()

    def run_and_wait(fit: Callable[[], None]) -> None:
        nonlocal waited
        fitted.clear()
        fits.run(lambda: (fit(), fitted.set()))
        began = time.thread_time()
        fitted.wait()
        waited += time.thread_time() - began

    end = account_of(chunks, explain=explain, fit=run_and_wait)
    took = timeit.repeat(end, number=2000, repeat=15, timer=lambda: time.thread_time() - waited)
    fits.stop()
    return min(took) / 2000 * 1e6


def fit_microseconds() -> float:
    took: list[float] = []

    def timed(fit: Callable[[], None]) -> None:
        began = time.thread_time()
        fit()
        took.append(time.thread_time() - began)

    end = account_of([Chunk(a_sequence(), 64, 1)], explain=True, fit=timed)
    for _ in range(1000):
        end()
    return statistics.median(took[-10:]) * 1e6


def a_sequence() -> Sequence:
    return Sequence("a", 0, [1] * 64, SamplingParams(), max_len=128)


def account_of(chunks: list[Chunk], *, explain: bool, fit: Run) -> Callable[[], None]:
    """Return what accounts for another step with these chunks, 10 ms after the one before."""
    causes = StepCauses(MachineTime(), StepCostFit(fit)) if explain else None
    account = StepAccount(HostTime(lambda: 0), causes)
    for chunk in chunks if causes is not None else ():
        chunk.sequence.causes = own = RequestCauses(has_several=False)
        own.begin(causes.totals, 0, 0, behind_prompts=False)
    step, result = Step(chunks), StepResult([])
    times = count(0, STEP_NS)

    def end() -> None:
        ended_ns = next(times)
        account.step_ended(step, result, ended_ns - STEP_NS + 100_000, ended_ns)
        if len(account.steps) > 1000:
            account.steps.clear()

    return end


if __name__ == "__main__":
    main()
