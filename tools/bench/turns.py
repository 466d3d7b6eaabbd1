"""Asks this server and another for the same answers in turns, with the same file of a model.

A round starts both servers, and asks them several times: one client, eight at once, and prompts of 512 tokens. The
server that is not asked is idle. Turns are short, because the speed of a shared machine's memory changes from second to
second. Prompts are random token ids and differ from request to request, so that none is in a cache.
"""

from __future__ import annotations

import statistics
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import ServerSpec, oaiserve
from tools.load import run_bench
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import ServerProcess, exit_on_sigterm

CLIENTS = 8
MAX_LEN = 4096


class Load(NamedTuple):
    """Requests of a length, of which a number run at once."""

    title: str
    num_requests: int
    at_once: int
    input_len: int
    output_len: int

    @property
    def tokens(self) -> int:
        """The tokens that count: of answers, or of prompts where these have one token."""
        return self.num_requests * (self.output_len if self.output_len > 1 else self.input_len)


LOADS = [
    Load("one client", 2, 1, 32, 64),
    Load("8 clients", CLIENTS, CLIENTS, 32, 64),
    Load("prompts of 512", 3, 1, 512, 1),
]


def _load(asked: str) -> Load:
    at_once, input_len, output_len = map(int, asked.replace("x", "/").split("/"))
    return Load(f"{at_once} at once, {input_len} in, {output_len} out", at_once, at_once, input_len, output_len)


def add_turns(parser: ArgumentParser, markers: str) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--turns", type=int, default=4, help="of each load and server, in a round (default 4)")
    parser.add_argument("--loads", nargs="+", type=_load, default=LOADS, help="as 8x128/64: 8 at once, 128 in, 64 out")
    add_publishing(parser, markers)


def publish_turns(
    arguments: Namespace, markers: str, models: Callable[[], Mapping[str, Path]], peer: Callable[..., ServerSpec]
) -> None:
    """Measure the models, by title, next to a peer with a number of sequences at once, and publish the table."""
    exit_on_sigterm()
    results = results_of(arguments, lambda asked: measure_turns(models(), peer, asked))
    publish(arguments, markers, results, report(results, arguments.loads))


def measure_turns(models: Mapping[str, Path], peer: Callable[..., ServerSpec], asked: Namespace) -> dict[str, Any]:
    """Return the figures of both servers, by model and round: tokens per second by load, memory and start."""
    loads = asked.loads
    most = max(CLIENTS, *(load.at_once for load in asked.loads))
    sizes = ("--max-running", str(most), "--max-model-len", str(MAX_LEN))
    runs: list[dict[str, Any]] = []
    for round_number in range(asked.repeats):
        for title, path in models.items():
            print(f"round {round_number + 1}: {title}", file=sys.stderr, flush=True)
            ours = oaiserve(path, *sizes)
            theirs = peer(path, most)
            # The model may have no chat template.
            first = ("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
            with ours.running(*first) as our_server, theirs.running(*first) as their_server:
                servers = {ours.name: our_server, theirs.name: their_server}
                seconds = {name: {load.title: [] for load in loads} for name in servers}
                for turn in range(asked.turns):
                    for number, load in enumerate(loads):
                        seed = 10_000 * round_number + 100 * turn + number
                        for name, server in list(servers.items())[:: -1 if turn % 2 else 1]:
                            seconds[name][load.title].append(asked_seconds(server, load, seed))
                for name, server in servers.items():
                    rates = {load.title: asked.turns * load.tokens / sum(seconds[name][load.title]) for load in loads}
                    known = {"start": server.start_seconds, "MiB": peak_rss_mib(server.process.pid)}
                    runs.append({"model": title, "server": name} | rates | known)
    return {"runs": runs}


def asked_seconds(server: ServerProcess, load: Load, seed: int) -> float:
    """Return how long the server takes to answer a load."""
    sizes = {"--num-requests": load.num_requests, "--input-len": load.input_len, "--max-new-tokens": load.output_len}
    options = sizes | {"--concurrency": load.at_once, "--seed": seed, "--warmup": 0}
    point = run_bench(server.url, options, "--no-stop-on-eos")
    seconds: float = point["runs"][0]["metrics"]["window_seconds"]
    return seconds


def report(results: dict[str, Any], loads: Sequence[Load]) -> str:
    """Return the table: medians over the rounds, and in parentheses how many times the other server's that is."""
    keys = [*(load.title for load in loads), "MiB", "start"]
    names = list(dict.fromkeys(run["server"] for run in results["runs"]))
    rows = [["file", *(f"{key}: {name}" for key in keys for name in names)]]
    for title in dict.fromkeys(run["model"] for run in results["runs"]):
        row = [title]
        for key in keys:
            ours, theirs = (
                statistics.median(run[key] for run in results["runs"] if (run["model"], run["server"]) == (title, name))
                for name in names
            )
            row += [f"{number(ours)} ({ours / theirs:.2f})", number(theirs)]
        rows.append(row)
    return "\n".join([f"{results['machine']} {results['created']}.", "", *as_markdown(rows)])
