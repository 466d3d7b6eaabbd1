"""Measures structured outputs, beside streams without constraints and against vLLM: python -m tools.bench.structured

Many streams run at any time, of which every other one is held to a JSON Schema; eight schemas take turns. A round has
three loads: this server half constrained, this server with the same prompts and lengths without constraints, and vLLM
with its default engine half constrained. Both servers run all the time, so that the turns follow closely on each other;
what the idle one and others use of the cores is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import ExitStack
from datetime import date
from typing import Any

from tools.bench import machine, servers
from tools.bench.process_usage import cpu_seconds, machine_cpu_seconds
from tools.bench.servers import ServerSpec
from tools.bench.structured_figures import OURS, OURS_FREE, PEER, figures, report
from tools.bench.structured_load import Run, run_load
from tools.bench.structured_requests import asks
from tools.markdown import add_publishing, publish, results_of, write_json
from tools.server_process import ServerProcess, exit_on_sigterm

QUICK = {"rounds": 1, "seconds": 8.0, "warm_up_seconds": 4.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="default 3")
    add("--streams", type=int, default=64, help="at any time, an even number (default 64)")
    add("--seconds", type=float, default=40.0, help="that each load is measured (default 40)")
    add("--warm-up-seconds", type=float, default=10.0, help="before that (default 10)")
    add("--quick", action="store_true", help="one short round, for a first look")
    add("--alone", action="store_true", help="without vLLM")
    add_publishing(parser, "structured", after="after each round")
    arguments = parser.parse_args()
    if arguments.streams < 2 or arguments.streams % 2:
        parser.error(f"--streams is {arguments.streams}, but must be an even number of at least 2.")
    if arguments.quick:
        vars(arguments).update(QUICK)
    exit_on_sigterm()
    results = results_of(arguments, measure)
    publish(arguments, "structured", results, report(results))
    is_valid = all(each[OURS]["valid_percent"] == 100 for each in results["rounds"])
    return 0 if is_valid else 1


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    specs = [servers.oaiserve(), *([] if arguments.alone else [servers.vllm()])]
    results: dict[str, Any] = {
        "created": date.today().isoformat(),
        "machine": machine.sentence(),
        **{name: getattr(arguments, name) for name in ("streams", "seconds", "warm_up_seconds")},
        "servers": {spec.name: {"version": spec.version, "command": spec.shown()} for spec in specs},
        "rounds": [],
    }
    with ExitStack() as stack:
        running = [stack.enter_context(spec.running()) for spec in specs]
        for spec, server in zip(specs, running, strict=True):
            spec.wait_for_full_speed(server)
        for number in range(arguments.rounds):
            results["rounds"].append(run_round(number, specs, running, arguments))
            write_json(arguments.json, results)
    return results


def run_round(
    number: int, specs: list[ServerSpec], running: list[ServerProcess], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of each load."""
    found = {}

    def load(name: str, place: int, **constraints: Any) -> Run:
        # The salt keeps the prefix caches from knowing the prompts of an earlier load.
        fields = {"model": specs[place].model_name, "cache_salt": f"{name} {number}"}
        streams = [asks(slot, number, **constraints, **fields) for slot in range(arguments.streams)]
        server = running[place].process.pid
        before = time.monotonic(), cpu_seconds(server), machine_cpu_seconds()
        times = {"warm_up_seconds": arguments.warm_up_seconds, "seconds": arguments.seconds}
        run = asyncio.run(run_load(running[place].url, streams, **times))
        took, server_seconds, machine_seconds = (
            b - a for a, b in zip(before, (time.monotonic(), cpu_seconds(server), machine_cpu_seconds()), strict=True)
        )
        found[name] = figures(run) | {
            "server_cores": round(server_seconds / took, 3),
            "other_cores": round((machine_seconds - server_seconds) / took - run.client_cores, 3),
        }
        print(f"round {number + 1}, {name}: {found[name]}", file=sys.stderr, flush=True)
        return run

    constrained = load(OURS, 0, with_constraints=True)
    lengths = [answer.num_tokens for answer in constrained.answers if answer.ask.schema is not None]
    load(OURS_FREE, 0, with_constraints=False, stand_in_tokens=[num_tokens for num_tokens in lengths if num_tokens])
    if len(running) > 1:
        load(PEER, 1, with_constraints=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
