"""Runs clients of all kinds on one server for minutes: python -m tools.soak --seed 1 --minutes 4

Starts `oaiserve serve demo`, or attaches to a server that has no other clients (--url). Clients send good and bad
requests, read slowly, and leave at any moment. What each client does is a function of the seed; how far it gets depends
on the machine. The server is sampled every second. In the end nothing may be left, and every request must be accounted
for.

Prints markdown, and a sentence for each check that failed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from tools.soak.clients import Clients
from tools.soak.run import SoakRun, failures, report
from tools.soak.server import SoakServer, started_server

SAMPLE_SECONDS, IDLE_SECONDS = 1.0, 60


async def soak(server: SoakServer, seed: int, seconds: float, num_clients: int) -> SoakRun:
    clients, samples = Clients(server.url, seed), [server.sample()]
    load = asyncio.create_task(clients.run(num_clients, seconds))
    while not load.done():
        samples.append(await asyncio.to_thread(server.sample))
        await asyncio.wait([load], timeout=SAMPLE_SECONDS)
    load.result()
    samples.append(server.sample())
    run = SoakRun(samples, clients.num_sent, clients.kinds, clients.statuses, clients.problems)
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
    arguments = parser.parse_args(argv)
    with nullcontext(SoakServer(arguments.url)) if arguments.url else started_server() as server:
        run = asyncio.run(soak(server, arguments.seed, 60 * arguments.minutes, arguments.clients))
        print(report(run))
        failed = failures(run) + server.stop()
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
