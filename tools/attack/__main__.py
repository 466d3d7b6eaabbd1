"""Attacks a running server, one attack after the other: python -m tools.attack

Each attack runs with a well-behaved neighbour, which streams and probes all the time. What the neighbour sees with
the attack is compared with what it sees without, shortly before and after. The server is a process of its own with the
demo model; one that ends or hangs is restarted for the next attack.

Prints a table in markdown and, at the end, what failed; then the exit code is 1.
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
from tools.attack.verdict import MOST_RSS_GROWTH_MIB, failures
from tools.markdown import as_markdown, number, publish, write_json
from tools.server_process import StartFailed, exit_on_sigterm

QUIET_SECONDS = 5.0
QUICK_QUIET_SECONDS = 2.0
WARM_UP_SECONDS = 8.0
QUICK_WARM_UP_SECONDS = 2.0
# Prompts that fill the KV cache of every kind of server, also where answers are short: 20,000 tokens.
NUM_FILLING_PROMPTS = 320
FILLING_WORDS = 60
MARKERS = "attacks"
HEAD = ("class", "attacks", "sent", "found", "ITL p99, times quiet", "ITL p99 ms", "RSS grows by, MiB", "verdict")
MOST_SHOWN = 3  # sentences of a verdict


def run_all(attacks: Sequence[Attack], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    quiet_seconds = QUICK_QUIET_SECONDS if arguments.quick else QUIET_SECONDS
    # A server and its neighbour stay until another kind is needed, or one is broken.
    with ExitStack() as stack:
        running: tuple[Server, Neighbour] | None = None
        for attack in attacks:
            try:
                if running is None or running[0].kind != attack.server:
                    running = None
                    stack.close()
                    server = stack.enter_context(oaiserve(attack.server, arguments.model, arguments.flags))
                    running = server, stack.enter_context(running_neighbour(server.url))
                    warm_up(server, QUICK_WARM_UP_SECONDS if arguments.quick else WARM_UP_SECONDS)
                result = measure(attack, *running, quiet_seconds=quiet_seconds, quick=arguments.quick)
            except StartFailed as error:
                result = Result(state="did not start", problems=[str(error)])
            if result.state != "alive" or result.rss_growth_mib > MOST_RSS_GROWTH_MIB:
                running = None  # the next attack begins with a server that this one has not harmed
            results.append(as_json(attack, result))
            print(f"{attack.name}: {verdict(results[-1]['failures'][:MOST_SHOWN])}", file=sys.stderr, flush=True)
            write_json(arguments.json, report(results, arguments))  # what is found so far: a run takes long
    return results


def warm_up(server: Server, seconds: float) -> None:
    """Let the server work, because the first large steps, uses of blocks of the KV cache, and images touch memory that
    stays: an attack would be blamed for the weights of the model's tower."""
    strike = Strike(server.url, server.process.log_file, quick=True, answer_seconds=120)
    asyncio.run(strike.ask_all(long_prompts(strike.number), 32))
    asyncio.run(strike.ask_all(prompts(NUM_FILLING_PROMPTS, FILLING_WORDS, max_tokens=1), 32))
    asyncio.run(strike.ask_all(sequences(strike.number), 1))  # a full batch
    if server.kind == "images":
        asyncio.run(strike.ask_all([of_image(url_of(plain("PNG", side=512)))], 1))
    time.sleep(seconds)


def as_json(attack: Attack, result: Result) -> dict[str, Any]:
    return (
        {
            "name": attack.name,
            "family": attack.family,
            "class": attack.of_class,
            "sends": attack.sends,
            "server": attack.server,
        }
        | result.as_json()
        | {"failures": failures(attack, result)}
    )


def report(found: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the results for the JSON file, in the order of the families."""
    by_name = {one["name"]: one for one in found}
    of_run = {"quick": arguments.quick, "model": arguments.model, "flags": arguments.flags}
    return of_run | {"attacks": [by_name[attack.name] for attack in ATTACKS if attack.name in by_name]}


def chosen(only: Sequence[str]) -> list[Attack]:
    """Return the attacks whose name or family is among these, or all."""
    if unknown := set(only) - {name for attack in ATTACKS for name in (attack.name, attack.family)}:
        raise SystemExit(f"There is no attack {', '.join(sorted(unknown))}. --list shows them.")
    selected = [attack for attack in ATTACKS if not only or attack.name in only or attack.family in only]
    kinds = list(dict.fromkeys(attack.server for attack in selected))
    return sorted(selected, key=lambda attack: kinds.index(attack.server))  # few starts


def markdown(attacks: Sequence[dict[str, Any]]) -> str:
    """Return a row for each class of attacks, with the worst of each figure. `each` are attacks that do not hold."""
    rows = []
    for name in dict.fromkeys(each["class"] for each in attacks):
        ones = [each for each in attacks if each["class"] == name]
        ratios = [each["itl_ratio"] for each in ones if each["itl_ratio"] is not None]
        slowest = [1000 * each["itl_attack"]["p99"] for each in ones if "p99" in each["itl_attack"]]
        num_sent = sum(each["num_sent"] for each in ones)
        growth = max(each["rss_peak_mib"] - each["rss_before_mib"] for each in ones)
        failed = [f"{each['name']}: {failure}" for each in ones for failure in each["failures"][:MOST_SHOWN]]
        rows.append(
            (name, f"{len(ones)}", f"{num_sent:,}", f"{sum(bool(each['failures']) for each in ones)}")
            + ((f"{max(ratios):.2f}", number(max(slowest))) if ratios else ("no tokens", "no tokens"))
            + (f"{growth:,.0f}", verdict(failed))
        )
    return "\n".join(as_markdown([HEAD, *rows]))


def verdict(failed: Sequence[str]) -> str:
    return f"**fails**: {'; '.join(failed)}".replace("|", "\\|").replace("\n", " ") if failed else "holds"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="an attack or a family; repeatable")
    parser.add_argument("--list", action="store_true", help="list the attacks, and run none")
    parser.add_argument("--quick", action="store_true", help="fewer requests and shorter windows, for a first look")
    parser.add_argument("--model", default="demo")
    parser.add_argument("flags", nargs="*", help="more flags of the servers, after --")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    attacks = chosen(arguments.only)
    if arguments.list:
        for attack in attacks:
            print(f"{attack.of_class:33} {attack.family:12} {attack.name:28} {attack.sends}")
        return 0
    if missing := [program for program in ("prlimit", "openssl") if shutil.which(program) is None]:
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
