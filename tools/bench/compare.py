"""Measures this server against its peers, on the same machine, in turns: python -m tools.bench.compare

A round starts the servers one after the other and runs the six workloads on each, with the same client and the same
prompts. Rounds are repeated, so that other work of the machine hits all servers alike. In the first round a server
starts twice: with empty compile caches, then with full ones. Model files are in the page cache both times.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from tools.bench import client, table
from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import OURS, PEERS, ServerSpec, oaiserve
from tools.bench.workloads import WORKLOADS, Workload
from tools.load import RunFailed
from tools.markdown import add_publishing, publish, results_of, write_json
from tools.server_process import StartFailed, exit_on_sigterm

WARM_UP = Workload("W0", "warm-up", 16, 16, 128, 16, concurrency=16)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--peers", nargs="*", default=list(PEERS), choices=list(PEERS), help="default: all")
    add("--only", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS), help="workloads (default: all)")
    add("--repeats", type=int, default=3, help="rounds (default 3)")
    add("--quick", action="store_true", help="the short form of each workload")
    add_publishing(parser, "cpu-peers", after="after each server")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measure)
    publish(arguments, "cpu-peers", results, table.report(results))
    return 1 if results["servers"][OURS]["problems"] else 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    servers = [oaiserve(), *(PEERS[name]() for name in arguments.peers)]
    workloads = [WORKLOADS[name].short() if arguments.quick else WORKLOADS[name] for name in arguments.only]
    results: dict[str, Any] = {
        "client": "`oaiserve bench run`",
        "is_short": arguments.quick,
        "servers": {
            server.name: {"version": server.version, "command": server.shown(), "rounds": [], "problems": {}}
            for server in servers
        },
    }
    for number in range(arguments.repeats):
        for server in servers:
            run_round(server, number, workloads, results["servers"][server.name])
            write_json(arguments.json, results)
    return results


def run_round(server: ServerSpec, number: int, workloads: list[Workload], into: dict[str, Any]) -> None:
    """Append to the server's rounds. What failed is noted as a problem, and later rounds leave it out."""
    problems = into["problems"]
    if "start" in problems:
        return
    figures: dict[str, Any] = {"workloads": {}}
    into["rounds"].append(figures)
    try:
        if number == 0:
            figures["first_start_seconds"] = first_start(server)
            say(f"{server.name}: {figures}")
        with server.running() as running:
            figures["start_seconds"] = round(running.start_seconds, 2)
            client.run(running, WARM_UP, seed=0)
            for workload in workloads:
                if workload.name in problems:
                    continue
                try:
                    run = client.run(running, workload, workload.seed(number))
                    figures["workloads"][workload.name] = run
                    say(f"{server.name}, round {number + 1}, {workload.name}: {run}")
                except RunFailed as error:
                    note(problems, workload.name, server, error)
                peak_mib = peak_rss_mib(running.process.pid)
                figures["peak_rss_mib"] = round(max(figures.get("peak_rss_mib", 0.0), peak_mib))
    except (StartFailed, RunFailed) as error:
        note(problems, "start", server, error)


def first_start(server: ServerSpec) -> float:
    """Start the server with empty compile caches, but with its files in the page cache."""
    for path in server.files:
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                file.read_bytes()
    for cache in server.compile_caches:
        shutil.rmtree(cache, ignore_errors=True)
    with server.running() as running:
        return round(running.start_seconds, 2)


def note(problems: dict[str, str], what: str, server: ServerSpec, error: Exception) -> None:
    """Note the message for the page, in one line. A long one, with a log, is cut in its middle."""
    say(f"{server.name}, {what}: {error}")
    text = " ".join(str(error).replace("|", " ").split())
    problems[what] = text if len(text) <= 400 else f"{text[:100]} ... {text[-300:]}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
