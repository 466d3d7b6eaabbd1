"""Attacks a running server, one attack after the other: python -m tools.attack

Each attack runs with a well-behaved neighbour, which streams and probes all the time. What the neighbour sees with
the attack is compared with what it sees without, shortly before and after. The server is a process of its own with the
demo model; one that ends or hangs is restarted for the next attack.

With --rounds, each attack is repeated on the same server, which must not hold more and more. `--only mixed --rounds 30`
is a soak of half an hour.

Prints what failed of each attack as it ends; the exit code is 1 if anything did.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.attack.attack import Attack, Strike
from tools.attack.families import ATTACKS
from tools.attack.families.bodies import long_prompts, prompts, sequences
from tools.attack.families.media import of_image, url_of
from tools.attack.measure import Result, measure
from tools.attack.media_files import plain
from tools.attack.neighbour import Neighbour, running_neighbour
from tools.attack.server import Server, oaiserve
from tools.attack.verdict import MOST_RSS_GROWTH_MIB, failures, growth
from tools.markdown import write_json
from tools.server_process import StartFailed, exit_on_sigterm

QUIET_SECONDS = 5.0
QUICK_QUIET_SECONDS = 2.0
WARM_UP_SECONDS = 8.0
QUICK_WARM_UP_SECONDS = 2.0
# Prompts that fill the KV cache of every kind of server, also where answers are short: 20,000 tokens.
NUM_FILLING_PROMPTS = 320
FILLING_WORDS = 60
MOST_SHOWN = 3  # sentences of a verdict


def run_all(attacks: Sequence[Attack], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the attacks, and return the results of each round, with what failed."""
    rows: list[dict[str, Any]] = []
    quiet_seconds = QUICK_QUIET_SECONDS if arguments.quick else QUIET_SECONDS
    # A server and its neighbour stay until another kind is needed, or one is broken.
    with ExitStack() as stack:
        running: tuple[Server, Neighbour] | None = None
        for attack in attacks:
            results: list[Result] = []
            for number in range(arguments.rounds):
                try:
                    if running is None or running[0].kind != attack.server:
                        running = None
                        stack.close()
                        server = stack.enter_context(oaiserve(attack.server))
                        running = server, stack.enter_context(running_neighbour(server.url))
                        warm_up(server, QUICK_WARM_UP_SECONDS if arguments.quick else WARM_UP_SECONDS)
                    results.append(measure(attack, *running, quiet_seconds=quiet_seconds, quick=arguments.quick))
                except StartFailed as error:
                    results.append(Result(state="did not start", problems=[str(error)]))
                is_broken = results[-1].state != "alive" or results[-1].rss_growth_mib > MOST_RSS_GROWTH_MIB
                if is_broken:
                    running = None  # the next attack begins with a server that this one has not harmed
                faults = failures(attack, results[-1])
                if number == arguments.rounds - 1 > 0:
                    faults += growth(results)
                rows.append(row(attack, results[-1], faults))
                print(f"{attack.name}: {'; '.join(faults[:MOST_SHOWN]) or 'holds'}", flush=True)
                # A run takes long, so what it has found so far is kept.
                write_json(arguments.json, {"quick": arguments.quick, "attacks": rows})
                if is_broken:
                    break
    return rows


def warm_up(server: Server, seconds: float) -> None:
    """Let the server work, because the first large steps, uses of blocks of the KV cache, and images touch memory that
    stays: an attack would be blamed for the weights of the model's tower."""
    strike = Strike(server.url, quick=True, answer_seconds=120)
    asyncio.run(strike.ask_all(long_prompts(strike.number), 32))
    asyncio.run(strike.ask_all(prompts(NUM_FILLING_PROMPTS, FILLING_WORDS, max_tokens=1), 32))
    asyncio.run(strike.ask_all(sequences(strike.number), 1))  # a full batch
    if server.kind == "images":
        asyncio.run(strike.ask_all([of_image(url_of(plain("PNG", side=512)))], 1))
    time.sleep(seconds)


def row(attack: Attack, result: Result, faults: Sequence[str]) -> dict[str, Any]:
    about = {name: getattr(attack, name) for name in ("name", "family", "of_class", "sends", "server")}
    return about | result.as_json() | {"failures": faults}


def chosen(only: Sequence[str]) -> list[Attack]:
    """Return the attacks whose name or family is among these, or all."""
    if unknown := set(only) - {name for attack in ATTACKS for name in (attack.name, attack.family)}:
        raise SystemExit(f"There is no attack {', '.join(sorted(unknown))}. --list shows them.")
    selected = [attack for attack in ATTACKS if not only or attack.name in only or attack.family in only]
    kinds = list(dict.fromkeys(attack.server for attack in selected))
    return sorted(selected, key=lambda attack: kinds.index(attack.server))  # few starts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="an attack or a family; repeatable")
    parser.add_argument("--list", action="store_true", help="list the attacks, and run none")
    parser.add_argument("--quick", action="store_true", help="fewer requests and shorter windows, for a first look")
    parser.add_argument("--rounds", type=int, default=1, help="how often to run each attack (default: 1)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args(argv)
    attacks = chosen(arguments.only)
    if arguments.list:
        for attack in attacks:
            print(f"{attack.of_class:33} {attack.family:12} {attack.name:28} {attack.sends}")
        return 0
    if shutil.which("prlimit") is None:
        raise SystemExit("This tool needs prlimit.")
    exit_on_sigterm()
    failed = [row["name"] for row in run_all(attacks, arguments) if row["failures"]]
    print(f"{len(attacks)} attacks, of which fail: {', '.join(dict.fromkeys(failed)) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
