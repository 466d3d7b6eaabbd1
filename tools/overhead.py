"""Measures what telemetry costs, as a ratio of paired runs: python -m tools.overhead

Two servers of the demo model run side by side: one with all telemetry (metrics, spans to a collector, a JSON log line
for each request), one with none. The same load runs on both in turns, and a pair of runs gives one ratio. Prints
markdown: the mean ratio with its 95 % confidence interval.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tools.load import run_bench
from tools.markdown import as_markdown
from tools.server_process import exit_on_sigterm, free_port, running_oaiserve, running_process

LOADS = {
    "streams": ("64 streams of 64 tokens", {"--num-requests": 64, "--input-len": 64, "--max-new-tokens": 64}),
    "burst": ("256 requests of one token", {"--num-requests": 256, "--input-len": 32, "--max-new-tokens": 1}),
}


def main() -> None:
    if sys.argv[1:2] == ["serve-without"]:
        return serve_without_telemetry(sys.argv[2:])
    if sys.argv[1:2] == ["collect"]:
        return collect(int(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, help="pairs of runs for each load (default 10)")
    parser.add_argument("--loads", nargs="+", default=list(LOADS), choices=list(LOADS))
    arguments = parser.parse_args()
    exit_on_sigterm()
    rows = [["load", "tokens/s, ratio", "ITL p99, ratio", "pairs", "tokens/s without"]]
    with servers() as urls:
        rows += [row(*urls, *LOADS[name], arguments.pairs) for name in arguments.loads]
    print("\n".join(as_markdown(rows)))


def row(with_url: str, without_url: str, title: str, load: dict[str, int], num_pairs: int) -> list[str]:
    pairs = measure_pairs(partial(run, with_url, load), partial(run, without_url, load), num_pairs)
    speeds, gaps = ([a[kind] / b[kind] for a, b in pairs if b[kind]] for kind in (0, 1))
    without = statistics.median(speed for _, (speed, _) in pairs)
    return [title, interval(speeds), interval(gaps), str(len(pairs)), f"{without:.0f}"]


def run(url: str, load: dict[str, int], seed: int) -> tuple[float, float]:
    """Return tokens per second, and the p99 of ITL in seconds, or 0 without any."""
    point = run_bench(url, load | {"--concurrency": load["--num-requests"], "--seed": seed}, "--no-stop-on-eos")
    metrics = point["runs"][0]["metrics"]
    gaps = metrics["distributions"]["itl"]
    return metrics["completion_tokens_per_second"], gaps["p99"] if gaps else 0.0


def measure_pairs(
    run_with: Callable[[int], Any], run_without: Callable[[int], Any], num_pairs: int
) -> list[tuple[Any, Any]]:
    """Return what both runs found, given a seed, by pair. The order changes from pair to pair. One more pair before is
    the warm-up. No seed comes twice, so that no prompt is in the prefix cache."""
    pairs = []
    for seed in range(0, 2 * num_pairs + 2, 2):
        if seed % 4:
            pairs.append((run_with(seed), run_without(seed + 1)))
        else:
            without = run_without(seed)
            pairs.append((run_with(seed + 1), without))
    return pairs[1:]


def interval(ratios: Sequence[float]) -> str:
    """Return the geometric mean of the ratios with its 95 % confidence interval; empty for fewer than two ratios."""
    if len(ratios) < 2:
        return ""
    logs = [math.log(ratio) for ratio in ratios]
    mean, error = statistics.mean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.4f} ({math.exp(mean - error):.4f} to {math.exp(mean + error):.4f})"


@contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """Run the server with all telemetry and the server without, and give their URLs."""
    port = free_port()
    with running_process([sys.executable, "-m", "tools.overhead", "collect", str(port)], port) as collector:
        flags, env = ("--log-format", "json"), os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
        with (
            running_oaiserve(*flags, env=env) as server,
            running_oaiserve(*flags, env=env, program=("-m", "tools.overhead", "serve-without")) as other,
        ):
            yield server.url, other.url


def serve_without_telemetry(arguments: list[str]) -> None:
    """Run the server with parts in place of its telemetry that do nothing."""
    from oaiserve import app, cli
    from oaiserve.facts import record

    class NoTelemetry:
        recent = live = None

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def record(self, _: Any) -> None: ...
        def observe_event_loop_lag(self, _: float) -> None: ...
        def count_refused_access(self, _: Any) -> None: ...
        def is_sampled(self, _: Any) -> bool:
            return False

        def close(self, _: float) -> bool:
            return True

        def render(self, _: str | None) -> tuple[bytes, str]:
            return b"", "text/plain"

    app.Telemetry = NoTelemetry  # type: ignore[assignment,misc]
    record.EngineAccount.note = lambda *_, **__: None  # type: ignore[method-assign]
    cli.main(arguments)


def collect(port: int) -> None:
    """Run a collector that reads what is exported to it and drops it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
