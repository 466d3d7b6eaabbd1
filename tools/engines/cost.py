"""Measures what the gateway in front of engines of other kinds adds: python -m tools.engines.cost

The engine is a server without a model, which answers at once. In turns, a client asks it through the gateway and past
it, one short stream after the other; the difference of their medians is what the gateway adds to the first token. Then
streams of 500 tokens pass through the gateway at once, and its CPU time is divided by their tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

import httpx

from tools.bench.process_usage import cpu_seconds
from tools.engines.running import running_gateway
from tools.load import run_bench
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import CHAT, exit_on_sigterm, free_port, running_process

TOKENS = 500  # Length of each stream.
GAP_SECONDS = 0.02  # between its tokens, so that each is an event of its own
WARM_UP = 20  # requests before the first turn
HEAD = ("what the gateway adds", "median", "range")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "loadtest", "null-server", "--port", str(port)]
        command += ["--gap-seconds", str(GAP_SECONDS)]
        engine = stack.enter_context(running_process(command, port, ready_path="/health"))
        gateway = stack.enter_context(running_gateway(engine.url, "--log-level", "warning"))
        direct, through = (stack.enter_context(httpx.Client(base_url=one.url)) for one in (engine, gateway))
        first_seconds(direct, WARM_UP)
        first_seconds(through, WARM_UP)
        first_us: list[float] = []
        token_us: list[float] = []
        for _ in range(arguments.turns):
            past: list[float] = []
            passed: list[float] = []
            for _ in range(arguments.requests):  # Both see the same load of the machine.
                past += first_seconds(direct, 1)
                passed += first_seconds(through, 1)
            first_us.append(1e6 * (statistics.median(passed) - statistics.median(past)))
            before = cpu_seconds(gateway.process.pid)
            options = {"--num-requests": arguments.streams, "--concurrency": arguments.streams}
            options |= {"--max-new-tokens": TOKENS, "--random-form": "words", "--input-len": 3, "--model": "null"}
            run_bench(gateway.url, options, "--no-stop-on-eos")
            seconds = cpu_seconds(gateway.process.pid) - before
            token_us.append(1e6 * seconds / (arguments.streams * TOKENS))
    return {"first_token_us": first_us, "token_us": token_us, "streams": arguments.streams}


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
    def row(what: str, values: list[float]) -> tuple[str, str, str]:
        return what, f"{number(statistics.median(values))} µs", f"{number(min(values))} to {number(max(values))}"

    tokens = f"CPU time per token of {results['streams']} streams"
    rows = [HEAD, row("time to the first token", results["first_token_us"]), row(tokens, results["token_us"])]
    return "\n".join(as_markdown(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="default 5")
    parser.add_argument("--requests", type=int, default=200, help="short streams of a turn, each way (default 200)")
    parser.add_argument("--streams", type=int, default=32, help="at once, for the CPU time (default 32)")
    add_publishing(parser, "engine-cost")
    arguments = parser.parse_args()
    exit_on_sigterm()
    publish(arguments, "engine-cost", results := results_of(arguments, measure), report(results))


if __name__ == "__main__":
    main()
