"""Measures the time of a lone prompt by its length: python -m tools.bench.prompts [MODEL]

Prompts of random tokens are sent one after the other, each for an answer of one token. The table has the prompt tokens
per second of each round's median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from tools.bench.servers import oaiserve
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import exit_on_sigterm

LENGTHS = (128, 256, 512, 1024, 2048, 4000)
PROMPTS_EACH = 3  # prompts of each length, in a round
MOST_ID = 40_000  # token ids that the vocabularies of real models have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file (default: the demo)")
    parser.add_argument("--rounds", type=int, default=2, help="starts of the server (default 2)")
    add_publishing(parser, "prompts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measured)
    publish(arguments, "prompts-model" if arguments.model else "prompts", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds = []
    for _ in range(arguments.rounds):
        with oaiserve(arguments.model).running() as server, httpx.Client(base_url=server.url, timeout=600) as client:
            ask(client, LENGTHS[0])
            rounds.append({str(length): tokens_per_second(client, length) for length in LENGTHS})
    return {"model": arguments.model.name if arguments.model else demo.NAME, "rounds": rounds}


def tokens_per_second(client: httpx.Client, length: int) -> float:
    seconds = []
    for _ in range(PROMPTS_EACH):
        began = time.monotonic()
        ask(client, length)
        seconds.append(time.monotonic() - began)
    return length / statistics.median(seconds)


def ask(client: httpx.Client, num_tokens: int) -> None:
    """Send a prompt of random tokens, and read its answer of one token."""
    prompt = random.choices(range(1000, MOST_ID), k=num_tokens)
    body = {"model": demo.NAME, "prompt": prompt, "max_tokens": 1}
    client.post("/v1/completions", json=body).raise_for_status()


def report(results: dict[str, Any]) -> str:
    head = ("tokens", *(f"round {place + 1}, tokens/s" for place in range(len(results["rounds"]))))
    rows = [(f"{length:,}", *(number(each[str(length)]) for each in results["rounds"])) for length in LENGTHS]
    about = f"{results['machine']}; {results['created']}; {results['model']}."
    return "\n".join([*textwrap.wrap(about, 120), "", *as_markdown([head, *rows])])


if __name__ == "__main__":
    main()
