"""Measures what streams cost the host: python -m tools.bench.host

A server of the demo model gets a runner that computes nothing, so its CPU time is that of the engine thread, which
schedules and detokenizes, and of the event loop, which writes events. Only what launches steps on a GPU is missing.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil

import oaiserve.engine.engine as engine
import oaiserve.process.child as child
from oaiserve.cli import main as serve
from oaiserve.engine.sequences.step import Chunk, ChunkResult, Logprobs, Masks, Step, StepResult
from oaiserve.engine.served_model import ServedModel
from tools.load import run_bench
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import exit_on_sigterm, running_oaiserve

PROGRAM = "tools.bench.host"
TOKENS_OF_ANSWER = 500
NUM_IDS = 1000  # ids that the runner draws, one after the other
FLAGS = (
    *("--max-running", "1024", "--max-connections-per-address", "0", "--kv-cache-memory", "2GiB"),
    # Otherwise each draw would have the demo model's repetition penalty, for which the host reads all ids.
    "--no-generation-config",
)


class InstantRunner:
    """Draws the next of some ids for each sequence, with log-probabilities if it asks for them, and computes
    nothing."""

    is_asynchronous = True
    is_exact = False

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        pass

    def launch(self, step: Step) -> Step:
        return step

    def draw(self, launched: Step, masks: Masks | None) -> None:
        pass

    def collect(self, launched: Step) -> StepResult:
        return StepResult([*map(self._result, launched.chunks)])

    def _result(self, chunk: Chunk) -> ChunkResult:
        if not chunk.max_draws:
            return ChunkResult([])
        token_id = NUM_IDS + chunk.end % NUM_IDS
        if (number := chunk.sequence.params.logprobs) is None:
            return ChunkResult([token_id])
        return ChunkResult([token_id], [Logprobs(token_id, -1.5, [*range(NUM_IDS, NUM_IDS + number)], [-2.0] * number)])


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the CPU time of the server for each token, in µs, by the number of streams, that of each of its processes
    if it has several, that of the client, and tokens/s."""
    counts = [str(count) for count in arguments.streams]
    taken: dict[str, dict[str, list[float]]] = {}
    rates: dict[str, list[float]] = {count: [] for count in counts}
    of_client: dict[str, list[float]] = {count: [] for count in counts}
    body = ("--extra-body", arguments.body) if arguments.body else ()
    flags = (*FLAGS, "--engine-process", arguments.engine_process, "--log-level", "warning")
    if arguments.front_processes > 1:
        flags += ("--front-processes", str(arguments.front_processes))
    with running_oaiserve(*flags, program=("-m", PROGRAM)) as server:
        pid = server.process.pid
        for turn in range(1 + arguments.turns):
            for count in counts:
                load = {"--num-requests": count, "--concurrency": count, "--max-new-tokens": TOKENS_OF_ANSWER}
                load |= {"--random-form": "words", "--input-len": 3}
                before = _seconds_by_process(pid)
                client_before = _seconds_of_clients()
                point = run_bench(server.url, load, "--no-stop-on-eos", *body)
                if turn == 0:  # It warms up.
                    continue
                rates[count].append(point["runs"][0]["metrics"]["completion_tokens_per_second"])
                us_per_second = 1e6 / (int(count) * TOKENS_OF_ANSWER)
                of_client[count].append((_seconds_of_clients() - client_before) * us_per_second)
                for name, seconds in _seconds_by_process(pid).items():
                    us = (seconds - before[name]) * us_per_second
                    taken.setdefault(name, {}).setdefault(count, []).append(us)
    whole = {
        count: [sum(parts) for parts in zip(*(of[count] for of in taken.values()), strict=True)] for count in counts
    }
    results: dict[str, Any] = {"cpu_us_per_token": whole, "client_us_per_token": of_client, "tokens_per_second": rates}
    if len(taken) > 1:
        results["of_processes_us_per_token"] = taken
    return results


def _seconds_by_process(pid: int) -> dict[str, float]:
    """Return the CPU times of the server's processes: "main" has started the others."""
    server = psutil.Process(pid)
    seconds = {"main": sum(server.cpu_times()[:2])}
    for process in server.children():
        words = process.cmdline()
        if "engine-process" in words or "oaiserve.fronts" in words:
            seconds["engine process" if "engine-process" in words else words[-1]] = sum(process.cpu_times()[:2])
    return seconds


def _seconds_of_clients() -> float:
    """Return the CPU time of the child processes that have ended: all are clients."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def report(results: dict[str, Any]) -> str:
    processes = results.get("of_processes_us_per_token", {})
    rows = [("streams", "CPU time per token, µs", *processes, "client", "tokens/s of one core", "tokens/s here")]
    for count, times in results["cpu_us_per_token"].items():
        middle = statistics.median(times)
        shown = f"{number(middle)} ({number(min(times))} to {number(max(times))})"
        of_processes = [*processes.values(), results["client_us_per_token"]]
        parts = [number(statistics.median(of[count])) for of in of_processes]
        rate = number(round(statistics.median(results["tokens_per_second"][count]), -2))
        rows.append((count, shown, *parts, number(round(1e6 / middle, -2)), rate))
    return "\n".join(as_markdown(rows))


def main(argv: Sequence[str]) -> None:
    if {"serve", child.COMMAND} & {*argv}:
        child.PROGRAM = ("-m", PROGRAM)
        module: Any = engine
        start_model = module.start_model

        def without_computing(*parameters: Any, **additions: Any) -> ServedModel:
            return replace(start_model(*parameters, **additions), runner=InstantRunner())

        module.start_model = without_computing
        serve(argv)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[64, 256], help="default: 64 256")
    parser.add_argument("--turns", type=int, default=3, help="of each number of streams (default 3)")
    parser.add_argument("--engine-process", choices=["on", "off"], default="off", help="default: off")
    parser.add_argument("--front-processes", type=int, default=1, help="default: 1")
    parser.add_argument("--body", help='more fields of each request, such as {"logprobs": true, "top_logprobs": 5}')
    add_publishing(parser, "host")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    publish(arguments, "host", results := results_of(arguments, measure), report(results))


if __name__ == "__main__":
    main(sys.argv[1:])
