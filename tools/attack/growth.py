"""Sends each route bodies of n and 2n bytes of its worst forms: python -m tools.attack.growth

With --functions, it needs no server: it measures functions that read what clients and models write, with n and 8n
characters of the input that costs them most. CI runs that.

A form passes if twice the bytes cost no more than twice the CPU time and twice the memory, with some room, each within
a limit; if a neighbour's /health answers within 100 ms meanwhile; and if no answer is a 5xx. One that fails is measured
up to three times more, because the machine may be busy. The server is a process of its own with the demo model.

Prints a table in markdown: the costliest forms of each route, and all that fail; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from tools.attack.attack import ATTACKER_KEY, CHAT, COMPLETIONS, NEIGHBOUR_KEY
from tools.attack.forms import COMPACT, CONVERSATIONS, EMBEDDINGS, MESSAGES, RERANKS, RESPONSES, SCORES, Form, forms
from tools.attack.functions import dialects, files, grammars, routes, streams
from tools.attack.functions.linear import Case, is_linear
from tools.attack.server import Server, oaiserve
from tools.bench import process_usage
from tools.markdown import as_markdown, publish
from tools.server_process import exit_on_sigterm

# n: within the limits of most fields, where all of their bytes are looked at, and far beyond these.
NUM_BYTES = (7_000, 28_000, 2**19)
MOST_RATIO = 2.8  # ratio of the cost of 2n bytes to that of n; a square is 4
# Costs of 2n bytes that are always allowed: too small to tell a square from a line
FREE_CPU_SECONDS = 0.25
FREE_MIB = 96.0
# An answer of the model may cost this much more: the prefill of a whole context, the probabilities of all its tokens,
# or the decode of a summary.
MODEL_CPU_SECONDS = 1.0
ECHO_CPU_SECONDS = 8.0
SUMMARY_CPU_SECONDS = 8.0
OF_MODEL = {
    COMPACT: SUMMARY_CPU_SECONDS,
    **dict.fromkeys((COMPLETIONS, CHAT, RESPONSES, MESSAGES, EMBEDDINGS, *SCORES, *RERANKS), MODEL_CPU_SECONDS),
}
MOST_CPU_SECONDS_PER_MIB = 4.0
MOST_MIB_PER_MIB = 96.0
MOST_HEALTH_SECONDS = 0.1
MOST_TRIES = 4
ANSWER_SECONDS = 120.0
PROBE_SECONDS = 0.01  # between two probes of /health
MARKERS = "growth"
HEAD = ("route", "form", "status", "KiB, 2n", "CPU s, n", "CPU s, 2n", "MiB, n", "MiB, 2n", "/health ms", "verdict")
MOST_SHOWN = 3  # forms of a route that hold


class Functions(Protocol):
    """A module with cases."""

    def cases(self) -> Iterable[Case]: ...


FUNCTIONS: tuple[Functions, ...] = (grammars, dialects, routes, streams, files)


class Cost(NamedTuple):
    """What one request cost the server."""

    status: str
    num_bytes: int
    cpu_seconds: float
    mib: float  # the peak above what was in use before
    health_seconds: float  # the longest


@dataclass
class Growth:
    path: str
    name: str
    costs: list[Cost]  # costs of n bytes, and of 2n
    failures: list[str]

    @property
    def cpu_seconds(self) -> float:
        return self.costs[-1].cpu_seconds


def failures(one: Cost, two: Cost, model_cpu_seconds: float = 0.0) -> list[str]:
    """Return the faults in the costs of n and 2n bytes. An answer of the model may cost `model_cpu_seconds` more."""
    free_cpu_seconds = FREE_CPU_SECONDS + (model_cpu_seconds if two.status[:1] == "2" else 0.0)
    problems = [f"answered {cost.status}" for cost in (one, two) if cost.status[:1] not in ("2", "4")]
    mib_sent = two.num_bytes / 2**20
    for what, first, second, free, most in (
        ("s of CPU", one.cpu_seconds, two.cpu_seconds, free_cpu_seconds, MOST_CPU_SECONDS_PER_MIB),
        ("MiB", one.mib, two.mib, FREE_MIB, MOST_MIB_PER_MIB),
    ):
        if second > free and second > MOST_RATIO * first:
            problems.append(f"{first:.2f} {what} became {second:.2f} with twice the bytes")
        if second > free and second > most * mib_sent + free:
            problems.append(f"{second:.2f} {what} for {mib_sent:.2f} MiB")
    slowest = max(one.health_seconds, two.health_seconds)
    if slowest > MOST_HEALTH_SECONDS:
        problems.append(f"/health took {1000 * slowest:.0f} ms")
    return problems


class Client:
    """A client that sends one request at a time, while a neighbour asks for /health."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._host = urlsplit(server.url).netloc

    def ask(
        self, method: str, path: str, body: bytes = b"", key: str = ATTACKER_KEY, **headers: str
    ) -> tuple[str, bytes]:
        """Return the status, or what went wrong, and the body of the answer."""
        connection = http.client.HTTPConnection(self._host, timeout=ANSWER_SECONDS)
        about = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        about |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, about)
            answer = connection.getresponse()
            return str(answer.status), answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, b""
        finally:
            connection.close()

    def cost(self, form: Form, path: str, num_bytes: int) -> Cost:
        body = form.body(num_bytes)
        pid = self._server.pid
        self.ask("GET", "/health", key=NEIGHBOUR_KEY)
        process_usage.reset_peak_rss(pid)
        before = process_usage.rss_mib(pid)
        cpu = process_usage.cpu_seconds(pid)
        with self._neighbour() as waits:
            headers = {name.replace("-", "_"): value for name, value in form.headers.items()}
            status, _ = self.ask("POST", path, body, **headers)
        spent = process_usage.cpu_seconds(pid) - cpu
        return Cost(status, num_bytes, spent, process_usage.peak_rss_mib(pid) - before, max(waits, default=0.0))

    @contextmanager
    def _neighbour(self) -> Iterator[list[float]]:
        """Ask for /health in the block, and collect how long each answer takes."""
        waits: list[float] = []
        is_over = threading.Event()

        def probe() -> None:
            while not is_over.wait(PROBE_SECONDS):
                started = time.monotonic()
                self.ask("GET", "/health", key=NEIGHBOUR_KEY)
                waits.append(time.monotonic() - started)

        thread = threading.Thread(target=probe)
        thread.start()
        try:
            yield waits
        finally:
            is_over.set()
            thread.join()


def measure(client: Client, form: Form, conversation: str, num_bytes: int) -> Growth:
    """Measure a form, and again if it fails: then the best of each figure counts."""
    path = form.path.replace("{conversation_id}", conversation)
    sizes = (num_bytes, 2 * num_bytes)
    is_echo = form.name.startswith("echo of ")
    model_cpu_seconds = ECHO_CPU_SECONDS if is_echo else OF_MODEL.get(form.path, 0.0)
    one, two = (client.cost(form, path, size) for size in sizes)
    for _ in range(MOST_TRIES - 1):
        if not failures(one, two, model_cpu_seconds):
            break
        one, two = (_better(cost, client.cost(form, path, size)) for cost, size in zip((one, two), sizes, strict=True))
    return Growth(form.path, form.name, [one, two], failures(one, two, model_cpu_seconds))


def _better(one: Cost, other: Cost) -> Cost:
    figures = (min(pair) for pair in zip(one[2:], other[2:], strict=True))
    return Cost(max(one.status, other.status), one.num_bytes, *figures)


def run_all(arguments: argparse.Namespace) -> list[Growth]:
    measured: list[Growth] = []
    chosen = [form for form in forms() if any(part in f"{form.path} {form.name}" for part in arguments.only or [""])]
    rest = iter(chosen)
    form = next(rest, None)
    while form is not None:
        with oaiserve("keys", arguments.model, arguments.flags) as server:
            client = Client(server)
            client.ask("POST", COMPLETIONS, b'{"prompt":"Hi","max_tokens":8}')
            state = "alive"
            while form is not None:
                # A conversation of its own for each, so that what one adds is no cost of the next.
                _, created = client.ask("POST", CONVERSATIONS, b"{}")
                conversation = json.loads(created or b"{}").get("id", "none")
                for num_bytes in arguments.bytes or NUM_BYTES:
                    measured.append(measure(client, form, conversation, num_bytes))
                    if not measured[-1].failures:
                        continue
                    if (state := server.state()) != "alive":
                        measured[-1].failures.append(f"the server {state}")
                    print(f"{form.path}, {form.name}: {'; '.join(measured[-1].failures)}", file=sys.stderr, flush=True)
                    if state != "alive":
                        break
                form = next(rest, None)
                if state != "alive":
                    break
    return measured


def measure_functions(only: Sequence[str], *, is_listed: bool) -> int:
    """Measure the functions, or list them. Print the slow ones, and return the exit code."""
    cases = [case for module in FUNCTIONS for case in module.cases() if any(part in case.name for part in only or [""])]
    if is_listed:
        print("\n".join(case.name for case in cases))
        return 0
    num_slow = 0
    for case in cases:
        if not is_linear(case.run, case.size):
            num_slow += 1
            print(f"{case.name}: takes more than linear time", flush=True)
    print(f"{num_slow} of {len(cases)} functions fail")
    return 1 if num_slow else 0


def markdown(found: Sequence[Growth]) -> str:
    rows = []
    for path in dict.fromkeys(growth.path for growth in found):
        ones = sorted((one for one in found if one.path == path), key=lambda one: -one.cpu_seconds)
        holding = [one for one in ones if not one.failures]
        for one in [each for each in ones if each.failures] + holding[:MOST_SHOWN]:
            first, second = one.costs
            verdict = f"**fails**: {'; '.join(one.failures)}" if one.failures else "holds"
            slowest = 1000 * max(first.health_seconds, second.health_seconds)
            costs = (f"{each.cpu_seconds:.2f}" for each in one.costs)
            sizes = (f"{each.mib:.0f}" for each in one.costs)
            sent = f"{second.num_bytes / 2**10:,.0f}"
            rows.append((path, one.name, second.status, sent, *costs, *sizes, f"{slowest:.0f}", verdict))
        rows.append((path, f"all {len(ones)}", "", "", "", "", "", "", "", f"{len(ones) - len(holding)} fail"))
    return "\n".join(as_markdown([HEAD, *rows]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="TEXT", help="forms with this in 'ROUTE NAME'; repeatable")
    parser.add_argument("--functions", action="store_true", help="measure functions in this process, and send nothing")
    parser.add_argument("--list", action="store_true", help="list the forms or functions, and measure none")
    parser.add_argument("--bytes", type=int, action="append", help=f"n; repeatable (default: {NUM_BYTES})")
    parser.add_argument("--model", default="demo")
    parser.add_argument("flags", nargs="*", help="more flags of the server, after --")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--markdown", type=Path, help=f"write the table between the markers '{MARKERS}' of this page")
    arguments = parser.parse_args(argv)
    if arguments.functions:
        return measure_functions(arguments.only or [], is_listed=arguments.list)
    if arguments.list:
        print("\n".join(f"{form.path} {form.name}" for form in forms()))
        return 0
    exit_on_sigterm()
    measured = run_all(arguments)
    results: dict[str, Any] = {"bytes": arguments.bytes or NUM_BYTES, "forms": [asdict(each) for each in measured]}
    publish(arguments, MARKERS, results, markdown(measured))
    return 1 if any(one.failures for one in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
