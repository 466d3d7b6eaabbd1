"""Measures what drafts bring: python -m tools.bench.drafts FILE...

Each file is served twice, with drafts and without, and asked in turns by one, four and eight clients for completions of
prose and code, some of which repeat parts of their prompts. Clients ask without a pause, so the rates are those of a
busy server: with a fixed number of requests, the last ones would run alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from tools.bench.servers import oaiserve
from tools.bench.turns import CLIENTS, MAX_LEN
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import ROOT, exit_on_sigterm

MAX_TOKENS = 96
RAMP_SECONDS = 4
WINDOW_SECONDS = 12
_CODE = (ROOT / "oaiserve" / "engine" / "engine.py").read_text()
PROMPTS = (
    "Write a Python function that parses a line of CSV with quotes.",
    "Explain how a hash map works.",
    "List ten animals and the sounds that they make.",
    f"Repeat this code, with a comment on each line:\n{_CODE[2000:3500]}",
    "Write a haiku about rain.",
    "Translate into French: The quick brown fox jumps over the lazy dog.",
    "What is a binary search tree? Show code.",
    f"Summarise this code:\n{_CODE[4000:6500]}",
)

SIZES = ("--kv-blocks", str(CLIENTS * MAX_LEN // 16), "--max-model-len", str(MAX_LEN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files or folders of models")
    parser.add_argument("--turns", type=int, default=6, help="of each number of clients and server (default 6)")
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 4, 8], help="default: 1 4 8")
    add_publishing(parser, "drafts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    publish(arguments, "drafts", results := results_of(arguments, measure), report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return characters per second of each turn, by file, number of clients, and whether there are drafts."""
    runs = []
    for path in arguments.files:
        print(path.name, file=sys.stderr, flush=True)
        first = ("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
        with (
            oaiserve(path, *SIZES, drafts="auto").running(*first) as drafting,
            oaiserve(path, *SIZES).running(*first) as plain,
        ):
            for clients in arguments.clients:
                for turn in range(arguments.turns):
                    servers = [("drafts", drafting), ("plain", plain)][:: -1 if turn % 2 else 1]
                    rates = {name: asyncio.run(characters_per_second(one.url, clients, turn)) for name, one in servers}
                    runs.append({"file": path.name, "clients": clients} | rates)
    return {"runs": runs}


async def characters_per_second(url: str, clients: int, seed: int) -> float:
    """Return how fast text comes while a number of clients ask without a pause. Drafts change no text."""
    chance = random.Random(seed)
    numbers = [0]

    async def ask(http: httpx.AsyncClient) -> None:
        while True:
            body = {"model": demo.NAME, "prompt": chance.choice(PROMPTS), "max_tokens": MAX_TOKENS, "temperature": 0}
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        numbers.append(len(json.loads(line[6:])["choices"][0]["text"]))

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        asking = [asyncio.create_task(ask(http)) for _ in range(clients)]
        await asyncio.sleep(RAMP_SECONDS)
        before = sum(numbers)
        began = time.perf_counter()
        await asyncio.wait(asking, timeout=WINDOW_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
        after = sum(numbers)
        ended = time.perf_counter()
        failed = [task for task in asking if task.done()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for task in failed:
            task.result()
    return (after - before) / (ended - began)


def report(results: dict[str, Any]) -> str:
    rows = [["file", "clients", "characters/s with drafts", "without", "ratio in turns (least to most)"]]
    keys = dict.fromkeys((run["file"], run["clients"]) for run in results["runs"])
    for file, clients in keys:
        runs = [run for run in results["runs"] if (run["file"], run["clients"]) == (file, clients)]
        ratios = [run["drafts"] / run["plain"] for run in runs]
        rates = [number(statistics.median(run[name] for run in runs)) for name in ("drafts", "plain")]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([file, str(clients), *rates, shown])
    return "\n".join([f"{results['machine']} {results['created']}.", "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
