"""Measures what the gateway in front of engines of other kinds adds: python -m tools.engines.cost

The engine is a server without a model, which answers at once. In turns, a client asks it through each proxy and past
it, one short stream after the other; the difference of their medians is what a proxy adds to the first token. Then
streams of 400 tokens pass through each proxy at once, and its CPU time is divided by their tokens. The table has the
medians of the turns with their ranges, and how many times the CPU time of the gateway of our servers each proxy takes.

Besides this gateway, the proxies are the gateway in front of oaiserve's own servers, and two that keep no account
(tools/engines/forwarder.py): one passes bytes on, and one also parses HTTP and writes it again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import httpx

from tools.bench.process_usage import cpu_seconds
from tools.load import run_bench
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import CHAT, ServerProcess, exit_on_sigterm, free_port, running_process

TOKENS = 400  # Length of each stream.
WARM_UP = 20  # requests before the first turn
ROUTE = ("-m", "oaiserve", "route", "--log-level", "warning")
FORWARD = ("-m", "tools.engines.forwarder")
# The command of each proxy, without its port.
OURS = "the gateway of our servers"
PROXIES: Mapping[str, tuple[str, ...]] = {
    "this gateway": (*ROUTE, "--engine", "http://127.0.0.1:{port}"),
    OURS: (*ROUTE, "--replica", "http://127.0.0.1:{port}"),
    "a forwarder that parses HTTP": (*FORWARD, "--parsed", "--to", "{port}"),
    "a forwarder of bytes": (*FORWARD, "--to", "{port}"),
}
HEAD = ("proxy", "adds to the first token", "range", "CPU time per token of {streams} streams", "range")
HEAD += ("times that of the gateway of our servers", "range")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    load = [os.getloadavg()[0]]
    with ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "loadtest", "null-server", "--port", str(port)]
        command += ["--gap-seconds", str(arguments.gap_seconds)]
        engine = stack.enter_context(running_process(command, port, ready_path="/health"))
        direct = stack.enter_context(httpx.Client(base_url=engine.url))
        first_seconds(direct, WARM_UP)
        proxies = {name: stack.enter_context(_running(words, port)) for name, words in PROXIES.items()}
        clients = {name: stack.enter_context(httpx.Client(base_url=proxy.url)) for name, proxy in proxies.items()}
        found: dict[str, dict[str, list[float]]] = {name: {"first_us": [], "token_us": []} for name in proxies}
        for client in clients.values():
            first_seconds(client, WARM_UP)
        for _ in range(arguments.turns):
            past: list[float] = []
            passed: dict[str, list[float]] = {name: [] for name in clients}
            for _ in range(arguments.requests):  # All see the same load of the machine.
                past += first_seconds(direct, 1)
                for name, client in clients.items():
                    passed[name] += first_seconds(client, 1)
            for name, proxy in proxies.items():
                found[name]["first_us"].append(1e6 * (statistics.median(passed[name]) - statistics.median(past)))
                found[name]["token_us"].append(_token_us(proxy, arguments.streams))
    load.append(os.getloadavg()[0])
    numbers = {name: getattr(arguments, name) for name in ("turns", "requests", "streams")}
    return {"proxies": found, "load_average": load, **numbers}


def _running(words: tuple[str, ...], engine_port: int) -> Any:
    port = free_port()
    command = [sys.executable, *(word.format(port=engine_port) for word in words), "--port", str(port)]
    return running_process(command, port, ready_path="/ready")


def _token_us(proxy: ServerProcess, streams: int) -> float:
    """Return the CPU time of a proxy for each token of these streams."""
    before = cpu_seconds(proxy.process.pid)
    options = {"--num-requests": streams, "--concurrency": streams}
    options |= {"--max-new-tokens": TOKENS, "--random-form": "words", "--input-len": 3, "--model": "null"}
    run_bench(proxy.url, options, "--no-stop-on-eos")
    return 1e6 * (cpu_seconds(proxy.process.pid) - before) / (streams * TOKENS)


def first_seconds(http: httpx.Client, count: int) -> list[float]:
    """Return the times to the first byte of streams of one token."""
    body = {"model": "null", "stream": True, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    found = []
    for _ in range(count):
        began = time.perf_counter()
        with http.stream("POST", CHAT, json=body) as answer:
            parts = answer.iter_raw()
            next(parts)
            found.append(time.perf_counter() - began)
            for _ in parts:
                pass
    return found


def report(results: dict[str, Any]) -> str:
    rows = [tuple(cell.format(streams=results["streams"]) for cell in HEAD)]
    ours = results["proxies"][OURS]["token_us"]
    for name, values in results["proxies"].items():
        first_ms = [first_us / 1000 for first_us in values["first_us"]]
        times = [one / other for one, other in zip(values["token_us"], ours, strict=True)]
        cells = [_cells(first_ms, " ms"), _cells(values["token_us"], " µs"), _cells(times, "")]
        rows.append((name, *(cell for pair in cells for cell in pair)))
    before, after = results["load_average"]
    said = f"{results['turns']} turns of {results['requests']} short streams each; "
    return "\n".join([*as_markdown(rows), "", f"{said}load average {before:.1f} before and {after:.1f} at the end"])


def _cells(values: list[float], unit: str) -> tuple[str, str]:
    return f"{number(statistics.median(values))}{unit}", f"{number(min(values))} to {number(max(values))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="default 3")
    parser.add_argument("--requests", type=int, default=200, help="short streams of a turn, each way (default 200)")
    parser.add_argument("--streams", type=int, default=32, help="at once, for the CPU time (default 32)")
    # With 20 ms, each token wakes the proxy; with less, it finds several of them, and the CPU's caches are warm.
    parser.add_argument("--gap-seconds", type=float, default=0.02, help="between the tokens of a stream (default 0.02)")
    add_publishing(parser, "engine-cost")
    arguments = parser.parse_args()
    exit_on_sigterm()
    publish(arguments, "engine-cost", results := results_of(arguments, measure), report(results))


if __name__ == "__main__":
    main()
