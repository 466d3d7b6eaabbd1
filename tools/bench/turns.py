"""Asks this server and another for the same answers in turns, with the same file of a model.

A round starts both servers, and asks them several times: one client, eight at once, and prompts of 512 tokens. The
server that is not asked is idle. Turns are short, because the speed of a shared machine's memory changes from second to
second. Prompts are random token ids and differ from request to request, so that none is in a cache.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import httpx

from oaiserve.files import demo
from tools import machine
from tools.bench import prepare
from tools.bench.process_usage import peak_rss_mib
from tools.bench.servers import OURS, START_LIMIT_SECONDS, ServerSpec
from tools.markdown import as_markdown, number
from tools.server_process import ROOT, ServerProcess, free_port, running_process

CACHE_TOKENS, CLIENTS = 32768, 8
TURNS = 4  # of each load and server, in a round


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of so many tokens, of which so many run at once."""

    title: str
    num_requests: int
    at_once: int
    input_len: int
    output_len: int

    def tokens(self) -> int:
        """Return the tokens that count: of answers, or of prompts where these have one token."""
        return self.num_requests * (self.output_len if self.output_len > 1 else self.input_len)


LOADS = (
    Load("one client", 2, 1, 32, 64),
    Load("8 clients", CLIENTS, CLIENTS, 32, 64),
    Load("prompts of 512", 3, 1, 512, 1),
)


def measure_turns(models: Mapping[str, Path], peer: Callable[[Path], ServerSpec], repeats: int) -> dict[str, Any]:
    """Return the figures of both servers, by model and round: tokens per second by load, memory and start."""
    runs: list[dict[str, Any]] = []
    for round_number in range(repeats):
        for title, path in models.items():
            print(f"round {round_number + 1}: {title}", file=sys.stderr, flush=True)
            specs = [oaiserve(path), peer(path)]
            with running(specs[0]) as ours, running(specs[1]) as theirs:
                servers = {specs[0].name: ours, specs[1].name: theirs}
                seconds = {name: {load.title: [] for load in LOADS} for name in servers}
                for turn in range(TURNS):
                    for load in LOADS:
                        for name, server in list(servers.items())[:: -1 if turn % 2 else 1]:
                            seconds[name][load.title].append(asked_seconds(server, load, f"{round_number} {turn}"))
                for name, server in servers.items():
                    rates = {load.title: TURNS * load.tokens() / sum(seconds[name][load.title]) for load in LOADS}
                    known = {"start": server.start_seconds, "MiB": peak_rss_mib(server.process.pid)}
                    runs.append({"model": title, "server": name} | rates | known)
    return {"created": date.today().isoformat(), "machine": machine.sentence(), "runs": runs}


def oaiserve(path: Path) -> ServerSpec:
    program = Path(sys.executable).with_name("oaiserve")
    sizes = ("--kv-blocks", str(CACHE_TOKENS // 16), "--max-model-len", str(CACHE_TOKENS // CLIENTS))
    # Answers to random prompts repeat themselves, so drafts would gain more than on real text.
    options = ("--served-model-name", demo.NAME, "--drafts", "off", *sizes)
    return ServerSpec(OURS, "", (str(program), "serve", str(path), *options), (path,))


def running(spec: ServerSpec) -> AbstractContextManager[ServerProcess]:
    """Run the server from its first answer to the end of the block."""
    port, log_file = free_port(), prepare.FOLDER / "logs" / f"turns-{spec.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    return running_process(
        spec.command(port),
        port,
        env={**os.environ, **spec.environment},
        cwd=ROOT,
        log_file=log_file,
        ready_path="/v1/completions",
        question={"model": demo.NAME, "prompt": "Hello", "max_tokens": 1},
        start_limit_seconds=START_LIMIT_SECONDS,
    )


def asked_seconds(server: ServerProcess, load: Load, seed: str) -> float:
    """Return how long the server takes to answer a load."""
    rng = random.Random(f"{seed} {load.title}")
    prompts = [[rng.randrange(100, 40_000) for _ in range(load.input_len)] for _ in range(load.num_requests)]
    return asyncio.run(_ask(server.url, prompts, load))


async def _ask(url: str, prompts: list[list[int]], load: Load) -> float:
    places = asyncio.Semaphore(load.at_once)

    async def ask(prompt: list[int]) -> None:
        body = {"model": demo.NAME, "prompt": prompt, "max_tokens": load.output_len, "temperature": 0}
        async with places:
            answer = await client.post("/v1/completions", json=body | {"ignore_eos": True})
        answer.raise_for_status()
        found = answer.json()["usage"]["completion_tokens"]
        if found != load.output_len:
            sys.exit(f"{url} answered with {found} tokens in place of {load.output_len}.")

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        started = time.monotonic()  # making the client takes a while
        await asyncio.gather(*(ask(prompt) for prompt in prompts))
        return time.monotonic() - started


def report(results: dict[str, Any]) -> str:
    """Return the table: medians over the rounds, and in parentheses how many times the other server's that is."""
    keys = [*(load.title for load in LOADS), "MiB", "start"]
    names = list(dict.fromkeys(run["server"] for run in results["runs"]))
    rows = [["file", *(f"{key}: {name}" for key in keys for name in names)]]
    for title in dict.fromkeys(run["model"] for run in results["runs"]):
        row = [title]
        for key in keys:
            ours, theirs = (
                statistics.median(run[key] for run in results["runs"] if (run["model"], run["server"]) == (title, name))
                for name in names
            )
            row += [f"{number(ours)} ({ours / theirs:.2f})", number(theirs)]
        rows.append(row)
    return "\n".join([f"{results['machine']} {results['created']}.", "", *as_markdown(rows)])
