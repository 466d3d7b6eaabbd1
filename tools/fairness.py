"""Simulates a greedy and a polite client that share a server, under several policies: python -m tools.fairness

The greedy one floods the server with long prompts of 16 choices each. The polite one sends a short request at a time;
in the second load it floods the server, too, so that both wait all the time. The scheduler is the real one; a formula
gives the time of a step, as in tools.simulate. Prints markdown, and draws the service over time.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from oaiserve.engine.blocks import BlockPool
from oaiserve.engine.policy import POLICIES
from oaiserve.engine.request import SamplingParams
from oaiserve.engine.scheduler import Limits, Scheduler
from oaiserve.engine.sequence import Place, Sequence
from oaiserve.engine.step import Step
from oaiserve.engine.waiting import GENERATED_WEIGHT
from tools.bench.plot import linear
from tools.markdown import as_markdown, number
from tools.simulate import BLOCK_SIZE, Costs

MAX_RUNNING = 64
KV_BLOCKS = 8192
SHORTEST_PROMPT, LONGEST_PROMPT = 256, 8192  # of the greedy client


class AsInThePaper(Scheduler):
    """A scheduler in which no client takes the place of another one that runs."""

    def _newcomer_is_next(self, step: Step) -> bool:
        return False

    def _make_way(self, sequence: Sequence, shared: list[int], step: Step) -> bool:
        return False


@dataclass
class Result:
    polite_waits_seconds: list[float] = field(default_factory=list)
    tokens: Counter[str] = field(default_factory=Counter)  # generated, by client
    service: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, greedy, polite
    seconds: float = 0.0
    num_preemptions: int = 0

    def largest_difference(self) -> int:
        """Return by how much one client got more than the other one, in any part of the time."""
        most = lowest = highest = 0
        for _, greedy, polite in self.service:
            difference = greedy - polite
            lowest, highest = min(lowest, difference), max(highest, difference)
            most = max(most, difference - lowest, highest - difference)
        return most


def simulate(scheduler: Scheduler, *, seconds: float, answer: int, polite_floods: bool) -> Result:
    """Simulate for a number of seconds, with answers of the greedy client of `answer` tokens, or up to 512 if 0."""
    rng, result, costs, now = random.Random(0), Result(), Costs(), 0.0
    paid: dict[Sequence, int] = {}  # the prompt tokens that were computed for a sequence
    service: Counter[str] = Counter()
    polite: dict[Sequence, float | None] = {}  # since when it waits

    def arrive(client: str, prompt_len: int, choices: int, max_tokens: int) -> None:
        leader, prompt = None, [rng.randrange(50_000) for _ in range(prompt_len)]
        for _ in range(choices):
            one = Sequence("", 0, prompt, SamplingParams(), max_len=prompt_len + max_tokens, client_name=client)
            scheduler.add(one, leader)
            leader = leader or one
            if client == "polite":
                polite[one] = now

    while now < seconds:
        while scheduler.num_waiting < 4 * MAX_RUNNING:
            arrive("greedy", rng.randint(SHORTEST_PROMPT, LONGEST_PROMPT), 16, answer or rng.randint(64, 512))
        while len(polite) < (MAX_RUNNING if polite_floods else 1):
            arrive("polite", rng.randint(16, 128), 1, rng.randint(16, 128))
        step = scheduler.schedule()
        assert step is not None
        for sequence in step.admitted:
            since = polite.get(sequence)
            if since is not None:
                result.polite_waits_seconds.append(now - since)
                polite[sequence] = None
        now += costs.seconds(step)
        for sequence, start, num_tokens, max_draws, _ in step.chunks:
            end = min(start + num_tokens, sequence.prompt_len)
            computed = max(0, end - max(start, paid.get(sequence, 0)))
            paid[sequence] = max(end, paid.get(sequence, 0))
            service[sequence.client_name] += computed + GENERATED_WEIGHT * max_draws
            result.tokens[sequence.client_name] += max_draws
        scheduler.advance(step)
        for chunk in step.chunks:
            scheduler.commit(chunk, [7] if chunk.max_draws else [])
            if chunk.sequence.place is Place.NOWHERE:
                del paid[chunk.sequence]
                polite.pop(chunk.sequence, None)
        result.service.append((now, service["greedy"], service["polite"]))
    result.polite_waits_seconds += [now - since for since in polite.values() if since is not None]
    result.seconds, result.num_preemptions = now, scheduler.num_preemptions
    scheduler.check_integrity()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="simulated time of each run (default 150)")
    parser.add_argument("--plot", type=Path, help="SVG of the service over time, of the first load")
    arguments = parser.parse_args()
    bound = 2 * max(LONGEST_PROMPT, GENERATED_WEIGHT * KV_BLOCKS * BLOCK_SIZE)
    rows = [("polite", "policy", "wait p50", "p99", "tokens/s greedy", "polite", "largest difference", "preempted")]
    lines: list[tuple[str, list[tuple[float, float]]]] = []
    for load, answer, polite_floods in (
        ("one at a time", 0, False),
        ("one at a time, the other's answers have 1,500 tokens", 1500, False),
        ("floods, too", 0, True),
    ):
        for name, kind in (("fcfs", Scheduler), ("fair", AsInThePaper), ("fair", Scheduler)):
            scheduler = kind(BlockPool(KV_BLOCKS, BLOCK_SIZE), Limits(MAX_RUNNING, 512), policy=POLICIES[name])
            result = simulate(scheduler, seconds=arguments.seconds, answer=answer, polite_floods=polite_floods)
            waits = result.polite_waits_seconds
            shown = "fair, makes no way" if kind is AsInThePaper else name
            rows.append(
                (
                    load,
                    shown,
                    *(f"{number(value)} s" for value in (statistics.median(waits), percentile_99(waits))),
                    *(number(result.tokens[client] / result.seconds) for client in ("greedy", "polite")),
                    number(result.largest_difference()),
                    number(result.num_preemptions),
                )
            )
            if polite_floods and kind is Scheduler:
                every = max(1, len(result.service) // 200)
                lines += [
                    (f"{client}, {name}", [(row[0], row[index] / 1000) for row in result.service[::every]])
                    for index, client in ((1, "greedy"), (2, "polite"))
                ]
    print("\n".join(as_markdown(rows)))
    print(f"\nThe bound for two clients that wait all the time is {bound:,}.")
    if arguments.plot:
        title = "Service of two clients that both flood the server"
        arguments.plot.write_text(linear(title, "seconds", "service, in 1,000", lines))


def percentile_99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]


if __name__ == "__main__":
    main()
