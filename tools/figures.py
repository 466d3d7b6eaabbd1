"""Measures the first figures of docs/benchmarks.md on this machine: python -m tools.figures

Starts `oaiserve serve demo` as a user would, loads it over HTTP, and times `submit` in process. Prints markdown.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from oaiserve.engine.engine import Engine
from tools.engine_load import complete
from tools.load import StreamsLoad
from tools.server_process import CHAT, QUESTION, exit_on_sigterm, running_oaiserve

# Runs a server from its first whole chat answer on.
server = partial(running_oaiserve, "--log-level", "warning", ready_path=CHAT, question=QUESTION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="cold starts to time (default 3)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each load (default 3)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    starts = []
    for _ in range(arguments.starts):
        with server() as running:
            starts.append(running.start_seconds)
    rows = [("start to first answer", "s", starts)]
    with server() as running:
        StreamsLoad(1, 128, 128).run(running.url, seed=0)  # warm-up
        for concurrency in (1, 64):
            load = StreamsLoad(concurrency, prompt_tokens=128, output_tokens=128)
            speeds = [
                # Each seed gives other prompts, so that none is in the prefix cache.
                load.run(running.url, seed=concurrency + repeat).tokens_per_second
                for repeat in range(arguments.repeats)
            ]
            rows.append((f"output tokens/s, {concurrency} at once", "1/s", speeds))
    for name, gap_seconds in (("back to back", 0.0), ("1 ms apart", 0.001)):
        delays = [submit_p99_us(gap_seconds) for _ in range(arguments.repeats)]
        rows.append((f"submit, p99, {name}", "µs", delays))
    print("| figure | unit | median | least | most |\n|---|---|---|---|---|")
    for name, unit, values in rows:
        print(f"| {name} | {unit} | {statistics.median(values):.1f} | {min(values):.1f} | {max(values):.1f} |")


def submit_p99_us(gap_seconds: float, num_requests: int = 1000) -> float:
    """Submit text prompts one after the other while the engine computes the earlier ones. With a gap, each one has to
    wake a tokenize worker from its sleep."""
    prompts = [f"{'Tell me something about the number ' * 8}{i}" for i in range(num_requests)]
    with Engine.from_pretrained("demo", max_waiting=2 * num_requests) as engine:
        run = complete(engine, prompts, 1, gap_seconds=gap_seconds)
    return statistics.quantiles(run.submit_ns, n=100)[98] / 1e3


if __name__ == "__main__":
    main()
