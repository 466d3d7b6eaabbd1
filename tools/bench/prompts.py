"""Measures the time of a lone prompt by its length: python -m tools.bench.prompts [MODEL ...]

Prompts of random tokens are sent one after the other, each for an answer of one token. The table has the prompt tokens
per second of each round's median. With --before, an earlier commit's server takes turns with this tree's, and the table
has the ratio of each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from tools.bench.earlier import checked_out
from tools.bench.servers import oaiserve
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import ROOT, exit_on_sigterm

DEMO = "demo"
LENGTHS = (128, 256, 512, 1024, 2048, 4000)
PROMPTS_EACH = 3  # prompts of each length, in a round
MOST_ID = 40_000  # token ids that the vocabularies of real models have


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[DEMO], help="GGUF files, or demo (default: demo)")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens of the prompts")
    parser.add_argument("--rounds", type=int, default=2, help="starts of each server (default 2)")
    parser.add_argument("--before", metavar="COMMIT", help="a commit to take turns with")
    add_publishing(parser, "prompts")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measured)
    publish(arguments, "prompts", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the tokens per second of each round, by the length, for each model and each tree."""
    models = [demo.fetched() if name == DEMO else Path(name) for name in arguments.models]
    with checked_out(arguments.before) if arguments.before else nullcontext() as before:
        trees = {"now": ROOT} | ({"before": before} if before else {})
        found: dict[str, dict[str, list[dict[str, float]]]] = {
            model.name: {tree: [] for tree in trees} for model in models
        }
        for place in range(arguments.rounds):
            for model in models:
                for tree in list(trees)[:: -1 if place % 2 else 1]:
                    server = oaiserve(model)
                    server = replace(server, environment=server.environment | {"PYTHONPATH": str(trees[tree])})
                    with server.running() as process, httpx.Client(base_url=process.url, timeout=600) as client:
                        found[model.name][tree].append(speeds(client, arguments.lengths))
    return {"before": arguments.before, "models": found}


def speeds(client: httpx.Client, lengths: list[int]) -> dict[str, float]:
    """Return the tokens per second of the lengths that fit into the model's context."""
    (model,) = client.get("/v1/models").raise_for_status().json()["data"]
    ask(client, LENGTHS[0])
    return {str(length): tokens_per_second(client, length) for length in lengths if length < model["max_model_len"]}


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
    commit = results["before"]
    rows = [["model", "tokens", "tokens/s", *([f"as a multiple of {commit}'s"] if commit else [])]]
    for model, trees in results["models"].items():
        for length in trees["now"][0]:
            by_tree = {tree: [each[length] for each in rounds] for tree, rounds in trees.items()}
            rows.append([model, f"{int(length):,}", ", ".join(map(number, by_tree["now"]))])
            if commit:
                ratios = [now / before for now, before in zip(by_tree["now"], by_tree["before"], strict=True)]
                rows[-1].append(", ".join(map(number, ratios)))
    about = f"{results['machine']}; {results['created']}; each round's median."
    return "\n".join([*textwrap.wrap(about, 120), "", *as_markdown(rows)])


if __name__ == "__main__":
    main()
