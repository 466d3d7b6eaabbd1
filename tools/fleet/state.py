"""What a router takes: time for a decision and for a report, memory for a replica and for a beginning of a prompt."""

from __future__ import annotations

import argparse
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from oaiserve.facts.prefix_keys import Prompt, prompt_of
from oaiserve.facts.report import MOST_KEYS, ReplicaReport
from oaiserve.scale.router import Router
from tools.markdown import as_markdown

FLEETS = (4, 64, 1000)
NUM_DECISIONS = 2000
NUM_PREFIXES = 200_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    rng = random.Random(arguments.seed)
    rows = [("replicas", "known prompt", "new prompt", "a report of 1,024 keys", "memory of a replica")]
    results: dict[str, Any] = {}
    for num_replicas in FLEETS:
        names = [f"10.0.{index // 256}.{index % 256}:8000" for index in range(num_replicas)]
        reports = [ReplicaReport(name, "1", 0, rng.randint(8, 12), 0, _keys(rng, MOST_KEYS)) for name in names]
        of_replica = _bytes_of(lambda names=names, reports=reports: _router(names, reports)) / num_replicas
        router = _router(names, [])
        times_us = {"report": _times_us(lambda report, router=router: router.learn(report, 0), reports)}
        known = [Prompt([*report.keys[:20]], 0, 1280) for report in rng.choices(reports, k=NUM_DECISIONS)]
        new = [Prompt([*_keys(rng, 20)], 0, 1280) for _ in range(NUM_DECISIONS)]
        for name, prompts in (("known", known), ("new", new)):
            times_us[name] = _times_us(lambda prompt, router=router: router.choose(prompt, 0), prompts)
        results[str(num_replicas)] = {"us": times_us, "bytes_of_a_replica": of_replica}
        shown = (_shown(times_us[name]) for name in ("known", "new", "report"))
        rows.append((f"{num_replicas:,}", *shown, f"{of_replica / 1024:.0f} KiB"))
    text = "\n".join(as_markdown(rows))
    per_prefix = _bytes_of(lambda: _used(rng)) / NUM_PREFIXES
    results["bytes_of_a_prefix"] = per_prefix
    text += f"\n\nA beginning of a prompt that is remembered takes {per_prefix:.0f} bytes.\n\n"
    rows = [("body", "blocks", "time to its keys")]
    for size in (2_000, 16_000, 64_000, 1_000_000):
        body = {"model": "m", "messages": [{"role": "user", "content": "lorem ipsum " * (size // 12)}]}
        times = _times_us(prompt_of, [body] * 200)
        results[f"body of {size} bytes"] = times
        rows.append((f"{size:,} bytes", str(len(prompt_of(body).keys)), _shown(times)))
    return results, text + "\n".join(as_markdown(rows))


def _keys(rng: random.Random, count: int) -> array[int]:
    return array("Q", (rng.getrandbits(64) for _ in range(count)))


def _router(names: Sequence[str], reports: Sequence[ReplicaReport]) -> Router:
    router = Router(most_prefixes=2 * MOST_KEYS * len(names))
    router.update_replicas(names, 0)
    for report in reports:
        router.learn(report, 0)
    return router


def _used(rng: random.Random) -> Router:
    """Return a router of two replicas that has placed prompts with NUM_PREFIXES different beginnings."""
    router = _router([f"{number}" for number in range(NUM_PREFIXES // MOST_KEYS)], [])
    for _ in range(NUM_PREFIXES // 8):
        router.choose(Prompt([rng.getrandbits(64) for _ in range(8)], 0, 512), 0)
    assert router.num_prefixes == NUM_PREFIXES
    return router


def _bytes_of(make: Callable[[], object]) -> int:
    """Return the memory of what is made."""
    tracemalloc.start()
    made = make()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del made
    return used


def _times_us(call: Callable[[Any], object], arguments: Sequence[Any]) -> tuple[float, float]:
    """Return the median and the 99th percentile of the times of calls."""
    times = []
    for argument in arguments:
        before = time.perf_counter_ns()
        call(argument)
        times.append((time.perf_counter_ns() - before) / 1000)
    times.sort()
    return statistics.median(times), times[int(0.99 * (len(times) - 1))]


def _shown(times_us: tuple[float, float]) -> str:
    return f"{times_us[0]:.0f} (p99 {times_us[1]:.0f}) µs"
