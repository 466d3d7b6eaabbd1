"""Runs the real scheduler against a model of the machine, far faster than real time: python -m tools.simulate

Sequences arrive, are computed and leave as in the engine, but without a model. A formula gives the time of a step, so
that policies can be compared. The scheduler's own time is measured. Prints markdown.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, field

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.policy import POLICIES
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Sequence
from oaiserve.engine.step import Step

BLOCK_SIZE = 16
NUM_WAITING = (100, 1_000, 10_000)


@dataclass
class Costs:
    """The seconds of a step: a constant, and a part for each token and for each 1,000 cached tokens that it reads. The
    defaults are near those of the demo model on two CPU cores."""

    step: float = 0.02
    token: float = 0.0005
    context: float = 0.0004

    def seconds(self, step: Step) -> float:
        context = sum(chunk.end for chunk in step.chunks)
        return self.step + self.token * step.num_tokens + self.context * context / 1000


@dataclass
class Result:
    schedule_us: list[float] = field(default_factory=list)  # of each step
    commit_us: list[float] = field(default_factory=list)  # of each step, with `advance`
    running: list[int] = field(default_factory=list)
    ttft_seconds: list[float] = field(default_factory=list)
    simulated_seconds: float = 0.0
    real_seconds: float = 0.0
    preemptions: int = 0


def simulate(
    policy: str, num_waiting: int, max_running: int, *, steps: int, kv_blocks: int, seed: int = 0, costs: Costs
) -> Result:
    """Simulate with `num_waiting` sequences waiting: when one is admitted, another arrives. A third share a prefix."""
    rng, result = random.Random(seed), Result()
    limits = Limits(max_running=max_running, max_step_tokens=max(2048, max_running))
    scheduler = Scheduler(BlockPool(kv_blocks, BLOCK_SIZE), limits, policy=POLICIES[policy])
    prefix = [rng.randrange(50_000) for _ in range(256)]
    arrived: dict[Sequence, float] = {}

    def arrive() -> None:
        own = [rng.randrange(50_000) for _ in range(rng.randint(16, 512))]
        prompt = prefix + own if rng.random() < 1 / 3 else own
        sequence = Sequence(str(len(arrived)), 0, prompt, SamplingParams(), max_len=len(prompt) + rng.randint(1, 512))
        arrived[sequence] = result.simulated_seconds
        scheduler.add(sequence)

    started = time.perf_counter()
    for _ in range(steps):
        while scheduler.num_waiting + scheduler.num_parked < num_waiting:
            arrive()
        before = time.perf_counter()
        step = scheduler.schedule()
        result.schedule_us.append((time.perf_counter() - before) * 1e6)
        assert step is not None
        result.simulated_seconds += costs.seconds(step)
        before = time.perf_counter()
        scheduler.advance(step)
        for chunk in step.chunks:
            scheduler.commit(chunk, [7] if chunk.max_draws else [])
        result.commit_us.append((time.perf_counter() - before) * 1e6)
        result.running.append(len(scheduler.running))
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.max_draws and sequence.num_generated == 1:
                result.ttft_seconds.append(result.simulated_seconds - arrived[sequence])
            if len(sequence.token_ids) >= sequence.max_len:
                del arrived[sequence]
    result.real_seconds = time.perf_counter() - started
    result.preemptions = scheduler.num_preemptions
    scheduler.check_integrity()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument(
        "--blocks-per-sequence",
        type=int,
        default=33,
        help="blocks in the pool for each running sequence; 24 are too few",
    )
    arguments = parser.parse_args()
    print("| policy | running | waiting | schedule p50 | p99 | commit p50 | p99 | TTFT p50 | p99 | preempted | speed |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for policy in arguments.policies:
        for max_running in (256, 1024):
            for num_waiting in NUM_WAITING:
                kv_blocks = max_running * arguments.blocks_per_sequence
                result = simulate(
                    policy, num_waiting, max_running, steps=arguments.steps, kv_blocks=kv_blocks, costs=Costs()
                )
                schedule = statistics.quantiles(result.schedule_us[arguments.steps // 3 :], n=100)
                commit = statistics.quantiles(result.commit_us[arguments.steps // 3 :], n=100)
                ttft = statistics.quantiles(result.ttft_seconds, n=100)
                print(
                    f"| {policy} | {statistics.mean(result.running[arguments.steps // 3 :]):.0f} | {num_waiting:,} "
                    f"| {schedule[49]:.0f} µs | {schedule[98]:.0f} µs | {commit[49]:.0f} µs | {commit[98]:.0f} µs "
                    f"| {ttft[49]:.1f} s | {ttft[98]:.1f} s "
                    f"| {result.preemptions} | {result.simulated_seconds / result.real_seconds:.0f}x |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
