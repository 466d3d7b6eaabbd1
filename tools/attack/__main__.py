"""Attacks a running server, one attack after the other: python -m tools.attack

Each attack runs beside a well-behaved neighbour, which streams and probes all the time. What the neighbour sees with
the attack is compared with what it sees without, shortly before and after. The server is a process of its own with the
demo model; one that ends or hangs is started anew for the next attack.

Prints a table in markdown and, at the end, what failed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.attack.attack import Attack, Strike
from tools.attack.families import ATTACKS, crowds
from tools.attack.measure import Result, measure
from tools.attack.neighbour import Neighbour, running_neighbour
from tools.attack.server import KINDS, Server, missing_programs, oaiserve
from tools.attack.table import markdown, row
from tools.attack.verdict import MOST_RSS_GROWTH_MIB, failures
from tools.markdown import publish, write_json
from tools.server_process import StartFailed, exit_on_sigterm

QUIET_SECONDS, QUICK_QUIET_SECONDS = 5.0, 2.0
WARM_UP_SECONDS, QUICK_WARM_UP_SECONDS = 8.0, 2.0
MARKERS = "attacks"


class Stage:
    """The server that is attacked next, and its neighbour. They stay until another kind is needed, or one is broken."""

    def __init__(self, model: str, flags: Sequence[str], warm_up_seconds: float) -> None:
        self._model, self._flags, self._warm_up_seconds = model, flags, warm_up_seconds
        self._stack = ExitStack()
        self._running: tuple[Server, Neighbour] | None = None

    def get(self, kind: str) -> tuple[Server, Neighbour]:
        """Return a server of the kind, and its neighbour. Raises StartFailed."""
        if self._running is None or self._running[0].kind != kind:
            self.close()
            server = self._stack.enter_context(oaiserve(kind, self._model, (*KINDS[kind].flags, *self._flags)))
            self._running = server, self._stack.enter_context(running_neighbour(server.url))
            self._warm_up(server)
        return self._running

    def _warm_up(self, server: Server) -> None:
        """Let the server work, because its first large steps touch memory that stays."""
        strike = Strike(server.url, server.pid, server.process.log_file, quick=True, answer_seconds=120)
        asyncio.run(crowds.long_prompts(strike))
        asyncio.run(crowds.sequences(strike))  # a full batch
        time.sleep(self._warm_up_seconds)

    def close(self) -> None:
        self._running = None
        self._stack.close()


@contextmanager
def stage(model: str, flags: Sequence[str], warm_up_seconds: float) -> Iterator[Stage]:
    made = Stage(model, flags, warm_up_seconds)
    try:
        yield made
    finally:
        made.close()


def run_all(attacks: Sequence[Attack], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    quiet = QUICK_QUIET_SECONDS if arguments.quick else QUIET_SECONDS
    warm_up = QUICK_WARM_UP_SECONDS if arguments.quick else WARM_UP_SECONDS
    with stage(arguments.model, arguments.flags, warm_up) as on:
        for attack in attacks:
            try:
                server, neighbour = on.get(attack.server)
                result = measure(
                    attack, server, neighbour, rounds=arguments.rounds, quiet_seconds=quiet, quick=arguments.quick
                )
            except StartFailed as error:
                result = Result(state="did not start", problems=[str(error)])
            if attack.ends_server or result.state != "alive" or result.rss_growth_mib > MOST_RSS_GROWTH_MIB:
                on.close()  # the next attack begins with a server that this one has not harmed
            results.append(as_json(attack, result))
            print(" | ".join(row(results[-1])), file=sys.stderr, flush=True)
            write_json(arguments.json, report(results, arguments))  # what is found so far: a run takes long
    return results


def as_json(attack: Attack, result: Result) -> dict[str, Any]:
    return (
        {"name": attack.name, "family": attack.family, "sends": attack.sends, "server": attack.server}
        | result.as_json()
        | {"failures": failures(attack, result)}
    )


def report(found: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results for the JSON file. With --keep, other attacks stay in it as they were found before."""
    by_name = {one["name"]: one for one in found}
    if arguments.keep and arguments.json.exists():
        before = json.loads(arguments.json.read_text())["attacks"]
        by_name = {one["name"]: one for one in before} | by_name
    names = ("rounds", "quick", "model", "flags")
    attacks = [by_name[attack.name] for attack in chosen(()) if attack.name in by_name]
    return {name: getattr(arguments, name) for name in names} | {"attacks": attacks}


def chosen(only: Sequence[str]) -> list[Attack]:
    """Return the attacks whose name or family is among these, or all."""
    if unknown := set(only) - {name for attack in ATTACKS for name in (attack.name, attack.family)}:
        raise SystemExit(f"There is no attack {', '.join(sorted(unknown))}. --list shows them.")
    found = [attack for attack in ATTACKS if not only or attack.name in only or attack.family in only]
    kinds = list(dict.fromkeys(attack.server for attack in found))
    return sorted(found, key=lambda attack: kinds.index(attack.server))  # few starts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="an attack or a family; repeatable")
    parser.add_argument("--list", action="store_true", help="list the attacks, and run none")
    parser.add_argument("--quick", action="store_true", help="fewer requests and shorter windows, for a first look")
    parser.add_argument("--rounds", type=int, default=1, help="how often each attack runs, with quiet between")
    parser.add_argument("--model", default="demo")
    parser.add_argument("flags", nargs="*", help="more flags of the servers, after --")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--keep", action="store_true", help="keep what the file of --json has of other attacks")
    parser.add_argument("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    attacks = chosen(arguments.only)
    if arguments.list:
        for attack in attacks:
            print(f"{attack.family:12} {attack.name:28} {attack.sends}")
        return 0
    if arguments.keep and arguments.json is None:
        parser.error("--keep needs --json, the file whose other results are kept")
    if missing := missing_programs():
        raise SystemExit(f"This tool needs {' and '.join(missing)}.")
    exit_on_sigterm()
    results = run_all(attacks, arguments)
    reported = report(results, arguments)
    publish(arguments, MARKERS, reported, markdown(reported["attacks"]))
    for one in results:
        for sentence in one["failures"]:
            print(f"{one['name']}: {sentence}", file=sys.stderr)
    return 1 if any(one["failures"] for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
