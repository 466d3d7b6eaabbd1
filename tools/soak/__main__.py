"""Runs clients of all kinds on one server for minutes: python -m tools.soak --seed 1 --minutes 4

Starts `oaiserve serve demo`, or attaches to a server that has no other clients (--url). Clients send good and bad
requests, read slowly, and leave at any moment. What each client does is a function of the seed; how far it gets depends
on the machine. The server is sampled every second. In the end nothing may be left, and every request must be accounted
for.

With --faults the server also meets, one after the other, a collector that is gone, a full disk, SIGSTOP, file
descriptors that run short, and a wall clock that is set (where libfaketime is installed).

Prints markdown, and a sentence for each check that failed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from tools.soak.clients import Clients
from tools.soak.faults import Faults, started_with_faults
from tools.soak.run import SoakRun, failures, report
from tools.soak.server import SoakServer, started_server

SAMPLE_SECONDS, IDLE_SECONDS = 1.0, 60


async def soak(
    server: SoakServer, seed: int, seconds: float, num_clients: int, faults: Faults | None = None
) -> SoakRun:
    clients, samples = Clients(server.url, seed, faults), [server.sample()]
    load = asyncio.create_task(clients.run(num_clients, seconds))
    bringing = asyncio.create_task(faults.run()) if faults is not None else None
    while not load.done():
        if faults is None or not faults.is_under_way:
            samples.append((await asyncio.to_thread(server.sample)).figures_only())
        await asyncio.wait([load], timeout=SAMPLE_SECONDS)
        if bringing is not None and bringing.done():
            bringing.result()
    load.result()
    if bringing is not None:
        bringing.cancel()
        await asyncio.wait([bringing])
    samples.append(server.sample())
    run = SoakRun(samples, clients.num_sent, clients.kinds, clients.statuses, clients.problems)
    if faults is not None:
        run.faults, run.num_excused = faults.counts, clients.num_excused
    deadline = time.monotonic() + IDLE_SECONDS
    # The last steps, records and connections may take a moment to end.
    while not run.is_settled and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        run.samples[-1] = server.sample()
    return run


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--url", help="of a server without other clients; it is not stopped")
    parser.add_argument("--faults", action="store_true", help="bring faults upon the server, too")
    parser.add_argument("--eager", action="store_true", help="serve in transformers' code, without the native step")
    arguments = parser.parse_args(argv)
    flags = ("--no-compile",) if arguments.eager else ()
    if arguments.url and arguments.faults:
        parser.error("--faults needs a server that this tool has started, so leave out --url")
    with ExitStack() as running:
        faults = None
        if arguments.url:
            server = SoakServer(arguments.url)
        elif arguments.faults:
            server, faults = running.enter_context(started_with_faults(*flags))
        else:
            server = running.enter_context(started_server(*flags))
        run = asyncio.run(soak(server, arguments.seed, 60 * arguments.minutes, arguments.clients, faults))
        print(report(run))
        failed = failures(run) + server.stop()
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
