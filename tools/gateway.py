"""Measures what the gateway adds to a request and to each event of a stream: python -m tools.gateway

The server behind it is real, with a device double in place of a model (tools.front_ends). So what is compared is the
way there: straight, or through `oaiserve route`. Runs of the two take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from time import monotonic_ns

from tools.front_ends import cpu_ns, light, quantile, read_streams, serving
from tools.markdown import as_markdown
from tools.server_process import ServerProcess, exit_on_sigterm, free_port, running_process


@dataclass
class Way:
    """One way to the server, and what was measured on it."""

    name: str
    entry: ServerProcess
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    own_us: list[float] = field(default_factory=list)  # CPU time of an event in the process that clients ask
    server_us: list[float] = field(default_factory=list)  # and in the server, where that is another one
    per_second: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=10, help="time of a step")
    parser.add_argument("--light", type=int, default=100, help="tokens of each of four streams")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    exit_on_sigterm()
    with ExitStack() as stack:
        server = stack.enter_context(serving(0, arguments.step_ms))
        gateway = stack.enter_context(gateway_to([server.url]))
        ways = [Way("straight", server), Way("through the gateway", gateway)]
        for way in ways:
            asyncio.run(read_streams(way.entry.url, 64, 20))  # warms up
        for _ in range(arguments.rounds):
            for way in ways:
                first, gaps = light(way.entry, arguments.light)
                way.first += first
                way.gaps += gaps
                busy(way, server, arguments.streams, arguments.tokens)
        print("\n".join(as_markdown(table(ways))), flush=True)


def busy(way: Way, server: ServerProcess, number: int, num_tokens: int) -> None:
    """Read so many streams at once, whose events come at the pace of the steps."""
    entry_pid, server_pid = way.entry.process.pid, server.process.pid
    entry_ns, server_ns, began_ns = cpu_ns(entry_pid), cpu_ns(server_pid), monotonic_ns()
    streams = asyncio.run(read_streams(way.entry.url, number, num_tokens))
    took_ns, num_events = monotonic_ns() - began_ns, sum(len(stream.read_ns) for stream in streams)
    way.own_us.append((cpu_ns(entry_pid) - entry_ns) / num_events / 1e3)
    way.server_us.append((cpu_ns(server_pid) - server_ns) / num_events / 1e3)
    way.per_second.append(num_events / took_ns * 1e9)


def table(ways: list[Way]) -> list[list[str]]:
    rows = [["", "TTFT p50 ms", "p99 ms", "ITL p50 ms", "p99 ms", "server, µs/event", "gateway, µs/event", "events/s"]]
    for way in ways:
        values = [statistics.median(way.first), quantile(way.first, 0.99)]
        values += [statistics.median(way.gaps), quantile(way.gaps, 0.99)]
        is_gateway = way is not ways[0]
        costs = [statistics.median(way.server_us), *([statistics.median(way.own_us)] if is_gateway else [])]
        shown = [f"{seconds * 1e3:.2f}" for seconds in values] + [f"{cost:.1f}" for cost in costs]
        shown += [] if is_gateway else [""]
        rows.append([way.name, *shown, f"{statistics.median(way.per_second):,.0f}"])
    return rows


@contextmanager
def gateway_to(urls: list[str]) -> Iterator[ServerProcess]:
    """Run the gateway in front of these servers until the end of the block."""
    port = free_port()
    command = [sys.executable, "-m", "oaiserve", "route", "--port", str(port)]
    with running_process([*command, *(f"--replica={url}" for url in urls)], port) as gateway:
        yield gateway


if __name__ == "__main__":
    main()
