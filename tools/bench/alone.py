"""Measures how wrong the time alone is after a start on a busy machine: python -m tools.bench.alone

A server starts on a quiet machine, and then beside other processes that use the cores all the time. Each time, one
client repeats the same small request. The reference is the time that the request really took on the quiet machine in
steps that nothing held up. The table compares with it what each request says that it would have taken alone: the cause
`alone` of its prefill and decode, if it is known.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from tools.bench.table import spread
from tools.markdown import add_publishing, as_markdown, publish, results_of
from tools.server_process import exit_on_sigterm, running_oaiserve

NEAR = 0.25  # the goal: the largest error
HELD_UP = 0.05  # share of a request's time; one whose steps waited longer for cores says nothing about a quiet machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a model as of `oaiserve serve` (default demo)")
    parser.add_argument("--busy", type=int, nargs="*", default=[2, 4, 8], help="numbers of busy processes")
    parser.add_argument("--seconds", type=int, default=300, help="of load after each start (default 300)")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between two requests (default 2)")
    add_publishing(parser, "alone")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measured)
    publish(arguments, "alone", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    runs = []
    for number in (0, *arguments.busy):
        with busy_processes(number):
            requests = load(arguments.model, arguments.seconds, arguments.pause)
        runs.append({"busy": number, "requests": requests})
    return {"model": str(arguments.model).rpartition("/")[2], "seconds": arguments.seconds, "runs": runs}


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def load(model: str, seconds: float, pause: float) -> list[dict[str, Any]]:
    """Start a server, repeat one request for `seconds`, and return the facts of every request, oldest first."""
    flags = ("--no-prefix-cache", "--drafts", "off", "--recent-requests", "10000")
    body = {"prompt": " ".join(str(number) for number in range(60)), "max_tokens": 32, "ignore_eos": True}
    with running_oaiserve(*flags, model=model, start_limit_seconds=600) as server:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=600).raise_for_status()
            time.sleep(pause)
        entries = httpx.get(f"{server.url}/debug/requests", timeout=60).json()["requests"]
    return [facts(entry) for entry in reversed(entries)]


def facts(entry: dict[str, Any]) -> dict[str, Any]:
    """Return how long the steps of a request took, how much of that they waited for a core, and how long they would
    have taken alone, or None if that isn't known."""
    phases = [phase for phase in entry["phases"] if phase["name"] in ("prefill", "decode")]
    causes = [phase["causes_ns"] for phase in phases]
    alone = [each.get("alone") for each in causes]
    host_ns = sum(each.get("host", 0) for each in causes)
    return {
        "steps_ns": sum(phase["duration_ns"] for phase in phases) - host_ns,
        "waited_ns": sum(each.get("machine", 0) for each in causes),
        "alone_ns": None if None in alone else sum(alone),
    }


def report(results: dict[str, Any]) -> str:
    quiet = [
        request["steps_ns"]
        for request in results["runs"][0]["requests"]
        if request["waited_ns"] <= HELD_UP * request["steps_ns"]
    ]
    if not quiet:
        raise SystemExit("The machine was never quiet, so there is nothing to compare with.")
    true_ns = statistics.median(quiet)
    head = ["busy processes", "a request took, s", "requests", "not known yet", "alone, s", f"within {NEAR:.0%}"]
    rows = [head]
    for run in results["runs"]:
        requests = run["requests"]
        alone_ns = [request["alone_ns"] for request in requests if request["alone_ns"] is not None]
        num_near = sum(abs(ns / true_ns - 1) <= NEAR for ns in alone_ns)
        rows.append(
            [
                str(run["busy"]),
                spread([request["steps_ns"] / 1e9 for request in requests]),
                str(len(requests)),
                str(len(requests) - len(alone_ns)),
                spread([ns / 1e9 for ns in alone_ns]),
                f"{num_near} of {len(alone_ns)}",
            ]
        )
    about = (
        f"{results['machine']}; {results['created']}. {results['model']}, the first {results['seconds']} s after each "
        f"start. On the quiet machine, the steps of a request that waited for no core took {true_ns / 1e9:.3g} s "
        f"(median of {len(quiet)})."
    )
    return "\n".join([textwrap.fill(about, 120), "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
