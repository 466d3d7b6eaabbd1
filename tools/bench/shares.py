"""Asks short prompts beside long ones of other clients: python -m tools.bench.shares [MODEL]

The light client sends a prompt of 40 tokens, waits for its answer of one token, and then for half a second on average.
Heavy clients send prompts of 1,535 tokens for 16 tokens, each in several threads and one request after the other. The
clients have addresses of their own. The table has the light client's times to first token, alone and beside each of
these, and how many prompt tokens the heavy ones got in a second, without and with the light one.

A second table has the light client's time per token of a stream, alone and beside 128 streams of another client, who
asks for 16 choices in each of eight threads, and the tokens that these get.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from tools.bench.servers import oaiserve
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import exit_on_sigterm

LIGHT_TOKENS = 40
HEAVY_TOKENS = 1535
ANSWER_TOKENS = 16  # of a heavy request
PAUSE_SECONDS = 0.5  # of the light client, on average
MOST_ID = 40_000  # token ids that the vocabularies of real models have
CROWDS = ((1, 6), (3, 2), (3, 6))  # heavy clients, and the threads of each
CHOICE_TOKENS = 64  # of each of these choices
STREAM_TOKENS = 24  # of a stream of the light client
CHOICES = 16  # of each request for streams of the heavy client
STREAMS_HEAD = ("streams of the heavy client", "time per token p50, ms", "p90", "tokens/s of the heavy one")
HEAD = (
    "heavy clients x threads",
    *("TTFT p50, ms", "p90", "max"),
    *("prompt tokens/s of the heavy ones beside it", "and without it"),
)
COMPLETIONS = "/v1/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file (default: the demo)")
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement (default 30)")
    parser.add_argument("--rounds", type=int, default=3)
    add_publishing(parser, "shares")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measured)
    publish(arguments, "shares", results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {}
    with oaiserve(arguments.model).running() as server:
        for _ in range(arguments.rounds):
            rounds.setdefault("alone", []).append({"light": light_seconds(server.url, arguments.seconds)})
            for crowd in CROWDS:
                with Crowd(server.url, *crowd) as heavy:
                    without = heavy.rate(arguments.seconds)
                    before = heavy.num_answers
                    began = time.monotonic()
                    light = light_seconds(server.url, arguments.seconds)
                    with_light = (heavy.num_answers - before) * HEAVY_TOKENS / (time.monotonic() - began)
                name = f"{crowd[0]} x {crowd[1]}"
                rounds.setdefault(name, []).append({"light": light, "heavy": with_light, "without": without})
            rounds.setdefault("no streams", []).append({"gaps": light_gaps(server.url, arguments.seconds)})
            with Crowd(server.url, 1, 8, num_choices=CHOICES) as heavy:
                before = heavy.num_answers
                began = time.monotonic()
                gaps = light_gaps(server.url, arguments.seconds)
                tokens = (heavy.num_answers - before) * CHOICES * CHOICE_TOKENS
                rate = tokens / (time.monotonic() - began)
            rounds.setdefault(f"{8 * CHOICES} streams", []).append({"gaps": gaps, "heavy": rate})
    return {"model": arguments.model.name if arguments.model else demo.NAME, "rounds": rounds}


def client_from(url: str, address: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=600, transport=httpx.HTTPTransport(local_address=address))


def ask(client: httpx.Client, num_tokens: int, max_tokens: int, num_choices: int = 1) -> None:
    """Send a prompt of random tokens, and read its whole answer."""
    prompt = random.choices(range(1000, MOST_ID), k=num_tokens)
    body = {"model": demo.NAME, "prompt": prompt, "max_tokens": max_tokens, "n": num_choices, "ignore_eos": True}
    client.post(COMPLETIONS, json=body).raise_for_status()


def light_seconds(url: str, seconds: float) -> list[float]:
    """Return how long each request of the light client took. Its answers have one token, so that is its TTFT."""
    taken = []
    ends = time.monotonic() + seconds
    with client_from(url, "127.0.0.2") as client:
        while time.monotonic() < ends:
            began = time.monotonic()
            ask(client, LIGHT_TOKENS, 1)
            taken.append(time.monotonic() - began)
            time.sleep(2 * PAUSE_SECONDS * random.random())
    return taken


def light_gaps(url: str, seconds: float) -> list[float]:
    """Return the time per token of each stream of the light client, after its first token."""
    gaps = []
    ends = time.monotonic() + seconds
    with client_from(url, "127.0.0.2") as client:
        while time.monotonic() < ends:
            body = {"model": demo.NAME, "prompt": random.choices(range(1000, MOST_ID), k=LIGHT_TOKENS), "stream": True}
            body |= {"max_tokens": STREAM_TOKENS, "ignore_eos": True}
            with client.stream("POST", COMPLETIONS, json=body) as answer:
                at = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
            gaps.append((at[-1] - at[0]) / (STREAM_TOKENS - 1))
            time.sleep(PAUSE_SECONDS * random.random())
    return gaps


class Crowd:
    """Heavy clients, who ask until the end of the block: with long prompts, or for several choices after short ones."""

    def __init__(self, url: str, num_clients: int, num_threads: int, num_choices: int = 1) -> None:
        self.num_answers = 0
        self._num_choices = num_choices
        self._url = url
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(f"127.0.1.{number + 1}",))
            for number in range(num_clients)
            for _ in range(num_threads)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        while self.num_answers < len(self._threads):
            time.sleep(0.1)
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def rate(self, seconds: float) -> float:
        """Return the prompt tokens per second of some time."""
        before = self.num_answers
        self._ends.wait(seconds)
        return (self.num_answers - before) * HEAVY_TOKENS / seconds

    def _ask(self, address: str) -> None:
        with client_from(self._url, address) as client:
            while not self._ends.is_set():
                if self._num_choices == 1:
                    ask(client, HEAVY_TOKENS, ANSWER_TOKENS)
                else:
                    ask(client, LIGHT_TOKENS, CHOICE_TOKENS, self._num_choices)
                self.num_answers += 1


def report(results: dict[str, Any]) -> str:
    rows = []
    streams = []
    for name, rounds in results["rounds"].items():
        if "gaps" in rounds[0]:
            gaps = sorted(1e3 * gap for each in rounds for gap in each["gaps"])
            heavy = [number(statistics.median(each["heavy"] for each in rounds))] if "heavy" in rounds[0] else [""]
            streams.append((name, number(statistics.median(gaps)), number(gaps[len(gaps) * 9 // 10]), *heavy))
            continue
        light = sorted(1e3 * seconds for each in rounds for seconds in each["light"])
        heavy = [
            number(statistics.median(each[key] for each in rounds)) for key in ("heavy", "without") if key in rounds[0]
        ]
        shown = map(number, (statistics.median(light), light[len(light) * 9 // 10], light[-1]))
        rows.append((name, *shown, *(heavy or ("", ""))))
    about = f"{results['machine']}; {results['created']}; {results['model']}."
    tables = [*as_markdown([HEAD, *rows]), "", *as_markdown([STREAMS_HEAD, *streams])]
    return "\n".join([*textwrap.wrap(about, 120), "", *tables])


if __name__ == "__main__":
    main()
