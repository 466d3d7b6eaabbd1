"""Measures what drafts bring: python -m tools.bench.drafts FILE...

Each file is served twice, with drafts and without, and asked in turns by 1 to 16 clients for completions of two kinds:

    tasks      of prose and code, some of which repeat parts of their prompts. Clients ask without a pause for a while,
               so the rate is that of a busy server.
    questions  three for each client, 24 at most. The rate is that up to the last answer, and drafts of other answers
               don't make that one faster: so here they must not cost anything.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from tools.bench.servers import oaiserve
from tools.bench.turns import MAX_LEN
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import ROOT, exit_on_sigterm

MAX_TOKENS = 120
CLIENTS = (1, 2, 4, 8, 16)
_CODE = (ROOT / "oaiserve" / "engine" / "engine.py").read_text()
TASKS = (
    "Write a Python function that parses a line of CSV with quotes.",
    "Explain how a hash map works.",
    "List ten animals and the sounds that they make.",
    f"Repeat this code, with a comment on each line:\n{_CODE[2000:3500]}",
    "Write a haiku about rain.",
    "Translate into French: The quick brown fox jumps over the lazy dog.",
    "What is a binary search tree? Show code.",
    f"Summarise this code:\n{_CODE[4000:6500]}",
)
QUESTIONS = (
    *("What is the capital of Australia, and why not Sydney?", "How does a refrigerator keep food cold?"),
    *("Why do leaves change their colour in autumn?", "Who was Ada Lovelace?", "How is bread made?"),
    *("What makes the sea salty?", "When did the Roman Empire end?", "How do vaccines work?"),
    *("What is the difference between a process and a thread?", "Why is the sky blue?", "How do bees find flowers?"),
    *("What does a central bank do?", "How far away is the moon?", "What is photosynthesis?"),
    *("How do I start to learn the piano?", "Why did the Titanic sink?", "What is a prime number?"),
    *("How does a bicycle stay upright?", "What causes earthquakes?", "How do I write a good letter of application?"),
    *("What do whales eat?", "How does GPS find my position?", "What is inflation?", "Who painted the Mona Lisa?"),
)

SIZES = ("--max-running", str(max(CLIENTS)), "--max-model-len", str(MAX_LEN))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="GGUF files or folders of models")
    parser.add_argument("--turns", type=int, default=6, help="of each load, number of clients and server (default 6)")
    parser.add_argument("--clients", nargs="+", type=int, default=CLIENTS, help="default: 1 2 4 8 16")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS], help="default: both")
    parser.add_argument("--seconds", type=float, default=12, help="of tasks, after a third of it (default 12)")
    add_publishing(parser, "drafts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    publish(arguments, "drafts", results := results_of(arguments, measure), report(results))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return characters per second of each turn, by file, load, number of clients, and whether there are drafts."""
    runs = []
    for path in arguments.files:
        print(path.name, file=sys.stderr, flush=True)
        first = ("/v1/completions", {"prompt": "Hello", "max_tokens": 1})
        with (
            oaiserve(path, *SIZES, drafts="auto").running(*first) as drafting,
            oaiserve(path, *SIZES).running(*first) as plain,
        ):
            cells = itertools.product(arguments.loads, arguments.clients, range(arguments.turns))
            for load, clients, turn in cells:
                rates = {}
                for name, server in [("drafts", drafting), ("plain", plain)][:: -1 if turn % 2 else 1]:
                    rates[name] = asyncio.run(LOADS[load](server.url, clients, turn, arguments.seconds))
                runs.append({"file": path.name, "load": load, "clients": clients} | rates)
    return {"runs": runs}


async def answer_tasks(url: str, clients: int, seed: int, seconds: float) -> float:
    """Return the characters per second while a number of clients ask without a pause."""
    tasks = itertools.cycle(random.Random(seed).sample(TASKS, len(TASKS)))
    numbers = [0]

    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        asking = [asyncio.create_task(_ask(http, tasks, numbers)) for _ in range(clients)]
        await asyncio.sleep(seconds / 3)
        before = sum(numbers)
        began = time.perf_counter()
        await asyncio.wait(asking, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        after = sum(numbers)
        ended = time.perf_counter()
        failed = [task for task in asking if task.done()]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        for task in failed:
            task.result()
    return (after - before) / (ended - began)


async def answer_questions(url: str, clients: int, seed: int, seconds: float) -> float:
    """Return the characters per second up to the last answer to a number of questions."""
    questions = iter(random.Random(seed).sample(QUESTIONS, min(3 * clients, len(QUESTIONS))))
    numbers = [0]
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await asyncio.gather(*(_ask(http, questions, numbers) for _ in range(clients)))
    return sum(numbers) / (time.perf_counter() - began)


LOADS = {"tasks": answer_tasks, "questions": answer_questions}


async def _ask(http: httpx.AsyncClient, prompts: Iterator[str], numbers: list[int]) -> None:
    """Ask for answers one after the other, and append the number of characters of each event."""
    for prompt in prompts:
        body = {"model": demo.NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    numbers.append(len(json.loads(line[6:])["choices"][0]["text"]))


def report(results: dict[str, Any]) -> str:
    head = ["characters/s with drafts", "without", "ratio in turns (least to most)"]
    rows = [["file", "load", "clients", *head]]
    for key, of_cell in itertools.groupby(results["runs"], lambda run: (run["file"], run["load"], run["clients"])):
        runs = [*of_cell]
        ratios = [run["drafts"] / run["plain"] for run in runs]
        rates = [number(statistics.median(run[name] for run in runs)) for name in ("drafts", "plain")]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([*map(str, key), *rates, shown])
    return "\n".join([f"{results['machine']}; {results['created']}.", "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
