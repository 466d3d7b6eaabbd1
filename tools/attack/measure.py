"""Runs one attack beside the neighbour: quiet, attack, quiet, and so on, and writes down what both saw."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.attack.attack import Attack, Strike, counted
from tools.attack.neighbour import Event, Neighbour, gaps, quantile, within
from tools.attack.server import Server
from tools.attack.wire import Answer

ATTACKER_NICENESS = 10  # the attacker's own work shall not take the server's cores
FIRST_TOKEN_SECONDS = 60.0  # the longest wait for the neighbour to decode before an attack
SETTLE_SECONDS = 1.0  # after an attack, before it is quiet


@dataclass(frozen=True)
class Window:
    start: float
    end: float


@dataclass
class Result:
    """What was measured. Seconds, MiB."""

    num_planned: int = 0
    num_sent: int = 0
    answers: list[Answer] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    took_seconds: float = 0.0
    cpu_seconds: float = 0.0  # of the server, during the attacks; the neighbour is served less then
    quiet_cpu_cores: float = 0.0  # that the server keeps busy for the neighbour alone
    rss_before_mib: float = 0.0
    rss_peak_mib: float = 0.0
    rss_after_mib: float = 0.0
    log_bytes: int = 0
    itl_quiet: list[float] = field(default_factory=list)
    itl_attack: list[float] = field(default_factory=list)
    ttft_quiet: list[float] = field(default_factory=list)  # of the probes that were answered
    ttft_attack: list[float] = field(default_factory=list)
    neighbour_outcomes: dict[str, int] = field(default_factory=dict)  # of its streams and probes
    health_outcomes: dict[str, int] = field(default_factory=dict)
    health_seconds: float = 0.0  # the longest
    state: str = "alive"
    load_average: float = 0.0  # of the machine before, which says how busy others kept it

    @property
    def rss_growth_mib(self) -> float:
        return self.rss_after_mib - self.rss_before_mib

    @property
    def itl_ratio(self) -> float | None:
        """The neighbour's ITL p99 with the attack, against its own without."""
        if not self.itl_quiet or not self.itl_attack:
            return None
        return quantile(self.itl_attack, 0.99) / quantile(self.itl_quiet, 0.99)

    def as_json(self) -> dict[str, Any]:
        """Return the figures, with summaries in the place of long lists."""
        found = asdict(self) | {"answers": counted(self.answers)}
        for name in ("itl_quiet", "itl_attack", "ttft_quiet", "ttft_attack"):
            values = getattr(self, name)
            found[name] = {"number": len(values)}
            if values:
                found[name] |= {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values)}
        found["itl_ratio"] = self.itl_ratio
        return _rounded(found)


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return _rounded(value)
        return round(value, 4) if isinstance(value, float) else value

    return {key: short(value) for key, value in values.items()}


def measure(
    attack: Attack, server: Server, neighbour: Neighbour, *, rounds: int, quiet_seconds: float, quick: bool
) -> Result:
    """Run the attack so many times, with quiet before and after each."""
    result, quiet, attacked = Result(load_average=os.getloadavg()[0]), [], []
    neighbour.wait_for_token(FIRST_TOKEN_SECONDS)
    num_events = len(neighbour.events)
    cpu_before = server.cpu_seconds
    quiet.append(_wait(quiet_seconds))
    result.quiet_cpu_cores = (server.cpu_seconds - cpu_before) / (quiet[0].end - quiet[0].start)
    server.reset_peak()
    result.rss_before_mib = server.rss_mib
    log_file = server.process.log_file
    log_before = log_file.stat().st_size
    for _ in range(rounds):
        cpu_before, started = server.cpu_seconds, time.monotonic()
        strike = Strike(server.url, server.pid, log_file, quick=quick, answer_seconds=attack.answer_seconds)
        _run(attack, strike)
        # An attack that is over at once goes on for a while, because a quantile needs many gaps.
        while (
            time.monotonic() - started < quiet_seconds
            and not attack.ends_server
            and strike.is_complete
            and not strike.problems
        ):
            _run(attack, strike)
        attacked.append(Window(started, time.monotonic()))
        result.took_seconds += attacked[-1].end - started
        result.cpu_seconds += server.cpu_seconds - cpu_before
        result.rss_peak_mib = max(result.rss_peak_mib, server.peak_rss_mib)
        result.num_planned += strike.num_planned
        result.num_sent += strike.num_sent
        result.answers += strike.answers
        result.problems += [problem for problem in strike.problems if problem not in result.problems]
        if server.process.process.poll() is not None:
            break
        time.sleep(SETTLE_SECONDS)
        quiet.append(_wait(quiet_seconds))
    result.log_bytes = log_file.stat().st_size - log_before
    _note_neighbour(result, neighbour.events, num_events, quiet, attacked)
    result.state = server.state()
    result.rss_after_mib = server.rss_mib
    return result


def _wait(seconds: float) -> Window:
    started = time.monotonic()
    time.sleep(seconds)
    return Window(started, time.monotonic())


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
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ATTACKER_NICENESS)  # on Linux, of this thread
        asyncio.run(limited())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _note_neighbour(
    result: Result, events: list[Event], num_before: int, quiet: list[Window], attacked: list[Window]
) -> None:
    found = gaps(events, time.monotonic())
    in_attacks = [gap for gap in found if any(gap.end > w.start and gap.start < w.end for w in attacked)]
    outside = [gap for gap in found if gap not in in_attacks]  # a stall that the attack began is not quiet
    result.itl_attack = [gap.seconds for gap in in_attacks]
    result.itl_quiet = [seconds for window in quiet for seconds in within(outside, window.start, window.end)]
    for event in events[num_before:]:
        during = any(window.start - event.seconds <= event.at <= window.end for window in attacked)
        if event.kind == "probe" and event.outcome == "200":
            (result.ttft_attack if during else result.ttft_quiet).append(event.seconds)
        if event.kind in ("probe", "ended"):
            result.neighbour_outcomes[event.outcome] = result.neighbour_outcomes.get(event.outcome, 0) + 1
        if event.kind == "health":
            result.health_outcomes[event.outcome] = result.health_outcomes.get(event.outcome, 0) + 1
            result.health_seconds = max(result.health_seconds, event.seconds)
