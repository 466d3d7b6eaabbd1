"""Asks short prompts beside long ones of other clients: python -m tools.bench.shares [MODEL]

The light client sends a prompt of 40 tokens, waits for its answer of one token, and then for half a second on average.
Heavy clients send prompts of 1,535 tokens for 16 tokens, each in several threads and one request after the other. The
clients have addresses of their own. The table has the light client's times to first token, alone and beside each of
these, and how many tokens of the heavy ones the servers computed in a second, without and with the light one.

A second table has the light client's time per token of a stream, alone and beside 128 streams of another client, who
asks for 16 choices in each of eight threads, and the tokens that these get, beside it and without it.

A third table has the times to first token of the light client's short prompts alone, and just after a prompt of 3,120
tokens of its own.

With --replicas 2, all of them ask a gateway with two servers.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from oaiserve.checkpoints import demo
from oaiserve.telemetry import names
from tools.bench.servers import oaiserve
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import CHAT, QUESTION, exit_on_sigterm, free_port, running_process

LIGHT_TOKENS = 40
HEAVY_TOKENS = 1535
ANSWER_TOKENS = 16  # answer of a heavy request
OWN_TOKENS = 3120  # long prompt of the light client
AHEAD_SECONDS = 0.1  # The long prompt runs for this before the short one comes.
PAUSE_SECONDS = 0.5  # pause of the light client, on average
MOST_ID = 40_000  # token ids that the vocabularies of real models have
CROWDS = ((1, 6), (3, 2), (3, 6))  # heavy clients, and the threads of each
CHOICE_TOKENS = 64  # tokens of each of these choices
TURNS = 2  # A turn is without the light client, twice beside it, and without it again.
STREAM_TOKENS = 24  # tokens of a stream of the light client
CHOICES = 16  # choices of each request for streams of the heavy client
STREAMS_HEAD = (
    *("streams of the heavy client", "time per token p50, ms", "p90"),
    *("tokens/s of the heavy one beside it", "and without it"),
)
OWN_HEAD = ("of the same client", "TTFT p50, ms", "p90", "max", "times alone")
TABLES = ("crowds", "streams", "own")
HEAD = (
    "heavy clients x threads",
    *("TTFT p50, ms", "p90", "max"),
    *("tokens/s of the heavy ones beside it", "and without it"),
)
COMPLETIONS = "/v1/completions"
STEP_TOKENS = names.ENGINE_STEP_TOKENS.name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, help="a GGUF file (default: the demo)")
    parser.add_argument("--seconds", type=float, default=30, help="of each measurement (default 30)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1, help="servers, behind a gateway if there are several")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables (default: all)")
    add_publishing(parser, "shares")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, measured)
    kind = ("shares", *(["model"] if arguments.model else []), *(["gateway"] if arguments.replicas > 1 else []))
    publish(arguments, "-".join(kind), results, report(results))


def measured(arguments: argparse.Namespace) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, Any]]] = {}
    seconds = arguments.seconds
    with servers(arguments.model, arguments.replicas) as (url, replicas):
        for _ in range(arguments.rounds):
            rounds.setdefault("alone", []).append({"light": light_seconds(url, seconds)})
            if "crowds" in arguments.only:
                for crowd in CROWDS:
                    rounds.setdefault(f"{crowd[0]} x {crowd[1]}", []).append(
                        beside_crowd(url, replicas, crowd, seconds)
                    )
            if "own" in arguments.only:
                rounds.setdefault(f"{OWN_TOKENS} tokens before", []).append({"own": own_seconds(url, seconds)})
            if "streams" in arguments.only:
                rounds.setdefault("no streams", []).append({"gaps": light_gaps(url, seconds)})
                rounds.setdefault(f"{8 * CHOICES} streams", []).append(beside_streams(url, replicas, seconds))
    model = arguments.model.name if arguments.model else demo.NAME
    return {"model": model, "replicas": arguments.replicas, "rounds": rounds}


def beside_crowd(url: str, replicas: list[str], crowd: tuple[int, int], seconds: float) -> dict[str, Any]:
    with Crowd(url, *crowd):
        light, rates = beside(replicas, seconds, lambda seconds: light_seconds(url, seconds), LIGHT_TOKENS)
    return {"light": light} | rates


def beside_streams(url: str, replicas: list[str], seconds: float) -> dict[str, Any]:
    with Crowd(url, 1, 8, num_choices=CHOICES):
        gaps, rates = beside(replicas, seconds, lambda seconds: light_gaps(url, seconds), LIGHT_TOKENS + STREAM_TOKENS)
    return {"gaps": gaps} | rates


def beside(
    replicas: list[str], seconds: float, ask_lightly: Callable[[float], list[float]], light_tokens: int
) -> tuple[list[float], dict[str, float]]:
    """Return what the light client measured, and the tokens per second of heavy ones beside it and without it.

    Both take turns of a few seconds, since the pace of a shared machine changes within minutes. The tokens are those of
    the servers' steps: a client may get only a handful of whole answers in ten seconds.
    """
    taken: list[float] = []
    tokens = {"heavy": 0.0, "without": 0.0}
    spent = {"heavy": 0.0, "without": 0.0}
    for key in ("without", "heavy", "heavy", "without") * TURNS:
        before = computed_tokens(replicas)
        began = time.monotonic()
        if key == "heavy":
            asked = ask_lightly(seconds / (2 * TURNS))
            taken += asked
            before += len(asked) * light_tokens
        else:
            time.sleep(seconds / (2 * TURNS))
        tokens[key] += computed_tokens(replicas) - before
        spent[key] += time.monotonic() - began
    return taken, {key: tokens[key] / spent[key] for key in tokens}


@contextmanager
def servers(model: Path | None, num_servers: int) -> Iterator[tuple[str, list[str]]]:
    """Run servers, and if there are several, a gateway before them. Yield where clients ask, and the servers' URLs."""
    with ExitStack() as running:
        replicas = [running.enter_context(oaiserve(model).running()).url for _ in range(num_servers)]
        url = replicas[0]
        if num_servers > 1:
            port = free_port()
            named = [word for replica in replicas for word in ("--replica", replica)]
            command = [sys.executable, "-m", "oaiserve", "route", "--port", str(port), *named]
            question = QUESTION | {"model": demo.NAME}
            url = running.enter_context(running_process(command, port, ready_path=CHAT, question=question)).url
        yield url, replicas


def computed_tokens(replicas: list[str]) -> float:
    """Return how many tokens the steps of all servers have computed so far, of prompts and of answers."""
    lines = "".join(httpx.get(f"{url}/metrics").text for url in replicas).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{STEP_TOKENS}_sum"))


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


def own_seconds(url: str, seconds: float) -> list[float]:
    """Return how long each short request of the light client took that came just after a long one of its own."""
    taken = []
    ends = time.monotonic() + seconds
    with client_from(url, "127.0.0.2") as client, ThreadPoolExecutor(1) as threads:
        while time.monotonic() < ends:
            long = threads.submit(ask, client, OWN_TOKENS, 1)
            time.sleep(AHEAD_SECONDS)
            began = time.monotonic()
            ask(client, LIGHT_TOKENS, 1)
            taken.append(time.monotonic() - began)
            long.result()
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
    own = []
    alone = statistics.median(seconds for each in results["rounds"]["alone"] for seconds in each["light"])
    for name, rounds in results["rounds"].items():
        if "gaps" in rounds[0]:
            gaps = sorted(1e3 * gap for each in rounds for gap in each["gaps"])
            streams.append((name, number(statistics.median(gaps)), number(gaps[len(gaps) * 9 // 10]), *rates(rounds)))
            continue
        if "own" in rounds[0]:
            taken = [seconds for each in rounds for seconds in each["own"]]
            own = [("alone", *shown_times(results["rounds"]["alone"], "light"), "1")]
            own.append((name, *shown_times(rounds, "own"), number(statistics.median(taken) / alone)))
            continue
        rows.append((name, *shown_times(rounds, "light"), *rates(rounds)))
    behind = f", {results['replicas']} servers behind a gateway" if results["replicas"] > 1 else ""
    about = f"{results['machine']}; {results['created']}; {results['model']}{behind}."
    tables = [[HEAD, *rows], [STREAMS_HEAD, *streams], [OWN_HEAD, *own]]
    tables = [table for table in tables if len(table) > 1]
    return "\n\n".join(["\n".join(textwrap.wrap(about, 120)), *("\n".join(as_markdown(table)) for table in tables)])


def shown_times(rounds: list[dict[str, Any]], name: str) -> list[str]:
    """Return the median, the ninetieth percentile and the maximum of times, in ms."""
    times = sorted(1e3 * seconds for each in rounds for seconds in each[name])
    return [number(each) for each in (statistics.median(times), times[len(times) * 9 // 10], times[-1])]


def rates(rounds: list[dict[str, Any]]) -> tuple[str, str]:
    """Return what heavy clients got in a second, beside the light one and without it, if there were any."""
    if "heavy" not in rounds[0]:
        return "", ""
    beside, without = (number(statistics.median(each[key] for each in rounds)) for key in ("heavy", "without"))
    return beside, without


if __name__ == "__main__":
    main()
