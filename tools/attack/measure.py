"""Runs one attack along with the neighbour: quiet, attack, quiet, and notes the results of both."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import psutil

from loadtest.intervals import percentile
from loadtest.measure import distribution
from tools.attack.attack import Attack, Strike
from tools.attack.neighbour import Event, Neighbour
from tools.attack.server import Server
from tools.attack.wire import Answer
from tools.bench import process_usage

ATTACKER_NICENESS = 10  # above the tool's and the server's: the attacker's own work shall not take their cores
FIRST_TOKEN_SECONDS = 60.0  # the longest wait for the neighbour to decode before an attack
SETTLE_SECONDS = 1.0  # after an attack, before it is quiet


class Span(NamedTuple):
    """A part of a run, or the gap between two tokens of the stream."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def meets(self, *others: Span) -> bool:
        return any(self.end > other.start and self.start < other.end for other in others)


@dataclass
class Result:
    """What was measured. Seconds, MiB."""

    num_sent: int = 0
    num_harmless: int = 0
    answers: list[Answer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    took_seconds: float = 0.0
    cpu_seconds: float = 0.0  # the server's CPU time during the attacks; the neighbour is served less then
    rss_before_mib: float = 0.0
    rss_peak_mib: float = 0.0
    rss_after_mib: float = 0.0
    num_files: int = 0  # open ones, and threads, after the attack
    num_threads: int = 0
    log_bytes: int = 0
    itl_quiet: list[float] = field(default_factory=list)
    itl_attack: list[float] = field(default_factory=list)
    itl_harmless: list[float] = field(default_factory=list)  # times next to harmless requests like those of the attack
    ratios_to_harmless: list[float] = field(default_factory=list)  # ratios of the ITL p99, in each round
    ttft_quiet: list[float] = field(default_factory=list)  # times of the probes that were answered
    ttft_attack: list[float] = field(default_factory=list)
    neighbour_outcomes: dict[str, int] = field(default_factory=dict)  # outcomes of its streams and probes
    health_outcomes: dict[str, int] = field(default_factory=dict)
    health_seconds: float = 0.0  # the longest
    state: str = "alive"

    @property
    def rss_growth_mib(self) -> float:
        return self.rss_after_mib - self.rss_before_mib

    @property
    def itl_ratio(self) -> float | None:
        """The neighbour's ITL p99 with the attack, against its own without."""
        if not self.itl_quiet or not self.itl_attack:
            return None
        return percentile(sorted(self.itl_attack), 99) / percentile(sorted(self.itl_quiet), 99)

    @property
    def ratio_to_harmless(self) -> float | None:
        return median(self.ratios_to_harmless) if self.ratios_to_harmless else None

    def as_json(self) -> dict[str, Any]:
        """Return the figures, with summaries in the place of long lists."""
        fields = vars(self) | {"itl_ratio": self.itl_ratio, "ratio_to_harmless": self.ratio_to_harmless}
        fields["answers"] = dict(sorted(Counter(answer.outcome for answer in self.answers).items()))
        for name in ("itl_quiet", "itl_attack", "itl_harmless", "ttft_quiet", "ttft_attack"):
            fields[name] = distribution(fields[name]) or {}
        rounded: dict[str, Any] = json.loads(json.dumps(fields), parse_float=lambda digits: round(float(digits), 4))
        return rounded


def measure(attack: Attack, server: Server, neighbour: Neighbour, *, quiet_seconds: float, quick: bool) -> Result:
    """Run the attack, with quiet before and after it."""
    result = Result()
    log_file = server.process.log_file
    neighbour.wait_for_token(FIRST_TOKEN_SECONDS)
    num_events = len(neighbour.events)
    before = _wait(quiet_seconds)
    process_usage.reset_peak_rss(server.pid)
    result.rss_before_mib = process_usage.rss_mib(server.pid)
    log_before = log_file.stat().st_size
    strike = Strike(server.url, quick=quick, answer_seconds=attack.answer_seconds)
    attacked: list[Span] = []
    harmless: list[Span] = []
    num_rounds = 1 if attack.harmless is None or quick else attack.rounds
    for _ in range(num_rounds):
        if attack.harmless is not None:
            seconds = attack.answer_seconds
            other = Strike(server.url, quick=quick, answer_seconds=seconds, harmless=attack.harmless)
            harmless.append(_run_for(attack, other, quiet_seconds))
            result.num_harmless += other.num_sent
            result.problems += [f"beside harmless requests: {problem}" for problem in other.problems]
        cpu_before = process_usage.cpu_seconds(server.pid)
        attacked.append(_run_for(attack, strike, quiet_seconds))
        result.cpu_seconds += process_usage.cpu_seconds(server.pid) - cpu_before
        if not strike.is_complete or strike.problems:
            break
    result.took_seconds = sum(span.seconds for span in attacked)
    result.rss_peak_mib = process_usage.peak_rss_mib(server.pid)
    result.num_sent = strike.num_sent
    result.answers = strike.answers
    result.problems = list(dict.fromkeys([*result.problems, *strike.problems]))
    quiet = [before]
    if server.exit_code is None:
        time.sleep(SETTLE_SECONDS)
        quiet.append(_wait(quiet_seconds))
    result.log_bytes = log_file.stat().st_size - log_before
    _note_neighbour(result, list(neighbour.events), num_events, quiet, attacked, harmless)
    result.state = server.state()
    result.rss_after_mib = process_usage.rss_mib(server.pid)
    if server.exit_code is None:
        process = psutil.Process(server.pid)
        result.num_files = process.num_fds()
        result.num_threads = process.num_threads()
    return result


def _wait(seconds: float) -> Span:
    started = time.monotonic()
    time.sleep(seconds)
    return Span(started, time.monotonic())


def _run_for(attack: Attack, strike: Strike, seconds: float) -> Span:
    """Run the attack, again and again for these seconds if it is over at once, because a quantile needs many gaps."""
    started = time.monotonic()
    _run(attack, strike)
    while time.monotonic() - started < seconds and strike.is_complete and not strike.problems:
        _run(attack, strike)
    return Span(started, time.monotonic())


def _run(attack: Attack, strike: Strike) -> None:
    """Run the attack in a thread of low priority, up to its limit."""

    async def limited() -> None:
        try:
            async with asyncio.timeout(attack.limit_seconds):
                await attack.run(strike)
        except TimeoutError:
            strike.problems.append(f"not through within {attack.limit_seconds:.0f} s")
        except ExceptionGroup as group:
            strike.problems.append(f"the attack failed: {group.exceptions[0]!r}")
        except OSError as error:
            strike.problems.append(f"the attack failed: {error!r}")

    def work() -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, 0) + ATTACKER_NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)  # on Linux, of this thread
        asyncio.run(limited())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def gaps(events: Sequence[Event], until: float) -> list[Span]:
    """Return the gaps of the streams. One that is open ends at `until`, so that a stall counts before it is over."""
    spans = []
    last = None
    for event in events:
        if event.kind not in ("token", "asked", "ended"):
            continue
        if last is not None and (event.kind == "token" or event.outcome != "200"):
            spans.append(Span(last, event.at))
        last = event.at if event.kind == "token" else None
    if last is not None:
        spans.append(Span(last, until))
    return spans


def _note_neighbour(
    result: Result, events: list[Event], num_before: int, quiet: list[Span], attacked: list[Span], harmless: list[Span]
) -> None:
    spans = gaps(events, time.monotonic())
    for gap in spans:
        if gap.meets(*attacked):  # a stall that the attack began is not quiet
            result.itl_attack.append(gap.seconds)
        elif gap.meets(*harmless):
            result.itl_harmless.append(gap.seconds)
        elif gap.meets(*quiet):
            result.itl_quiet.append(gap.seconds)
    for attack, other in zip(attacked, harmless, strict=True) if harmless else ():
        beside_attack = sorted(gap.seconds for gap in spans if gap.meets(attack))
        beside_other = sorted(gap.seconds for gap in spans if gap.meets(other) and not gap.meets(attack))
        if beside_attack and beside_other:
            result.ratios_to_harmless.append(percentile(beside_attack, 99) / percentile(beside_other, 99))
    new = events[num_before:]
    for event in new:
        if event.kind == "probe" and event.outcome == "200":
            during = Span(event.at, event.at + event.seconds).meets(*attacked)
            if during:
                result.ttft_attack.append(event.seconds)
            elif not Span(event.at, event.at + event.seconds).meets(*harmless):
                result.ttft_quiet.append(event.seconds)
    result.neighbour_outcomes = dict(Counter(event.outcome for event in new if event.kind in ("probe", "ended")))
    health = [event for event in new if event.kind == "health"]
    result.health_outcomes = dict(Counter(event.outcome for event in health))
    result.health_seconds = max((event.seconds for event in health), default=0.0)
