"""Clients of all kinds on one server, for minutes: python -m tools.soak --seed 1 --minutes 4

Starts `oaiserve serve demo`, or attaches to a server that has nothing else to do (--url). Clients ask well and badly,
read slowly, leave at any moment. What each of them does is a function of the seed; how far it comes depends on the
machine. The server is sampled every second. In the end nothing may be left, and every request must be accounted for.

Prints markdown, and a sentence for each check that failed; then the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from oaiserve.record import Outcome
from oaiserve.telemetry import names
from tools.figures import free_port

ROOT = Path(__file__).parent.parent
# A cache that is soon full, so that its pages are touched early; limits that the clients do reach. float32, because in
# bfloat16 oneDNN keeps code for each number of tokens that a step ever had: half a GiB that takes minutes to be there.
FLAGS = (
    *("--dtype", "float32", "--kv-cache-memory", "48MiB", "--max-running", "24", "--max-waiting", "16"),
    *("--write-timeout-seconds", "1"),
)
START_SECONDS, ANSWER_SECONDS, IDLE_SECONDS, STOP_SECONDS = 120, 300, 60, 60
SAMPLE_SECONDS = 1.0
MOST_RSS_MIB_PER_MINUTE = 2.0
LEAST_SECONDS_FOR_TRENDS = 60.0  # of the second half; in less, things still happen for the first time
SMALL_BUFFER_BYTES = 4096
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("a", "the", "fox", "sea", "hill", "old", "river", "sings", "under", "then", "why", "seven", "Once", "Question")

# -- what clients do --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Action:
    """One request, all its chance drawn beforehand. The last four fields are for those who do not behave."""

    kind: str
    path: str
    body: bytes
    statuses: frozenset[int] = frozenset({200, 429})
    method: str = "POST"
    num_answers: int = 1  # choices, over all prompts
    body_bytes: int | None = None  # sends only so many, and leaves
    leave_after_events: int | None = None  # of a stream
    leave_after_seconds: float | None = None  # wherever it is by then, having read nothing
    by_reset: bool = False  # leaves without a farewell

    @property
    def behaves(self) -> bool:
        return self.body_bytes is self.leave_after_events is self.leave_after_seconds is None

    @property
    def reaches_a_generation_route(self) -> bool:
        return self.method == "POST" and self.path in (CHAT, COMPLETIONS)


@dataclass(frozen=True)
class Turn:
    """What a client does at once, and how long it rests before."""

    pause_seconds: float
    actions: tuple[Action, ...]


def bad(kind: str, status: int, body: bytes | dict[str, Any], path: str = COMPLETIONS, method: str = "POST") -> Action:
    """A full server may say so first, where only the tokenizer can see what is wrong."""
    return Action(f"bad: {kind}", path, as_bytes(body), frozenset({status, 429}), method)


def as_bytes(body: bytes | dict[str, Any]) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


HI = [{"role": "user", "content": "Hi"}]
BAD_ACTIONS = (
    bad("half an object", 400, b'{"prompt": "Hi"'),
    bad("not UTF-8", 400, b'{"prompt": "\xff\xfe"}'),
    bad("a list", 400, b'["Hi"]', CHAT),
    bad("a prompt of a wrong type", 400, {"prompt": 5}),
    bad("max_tokens of a wrong type", 400, {"messages": HI, "max_tokens": "5"}, CHAT),
    bad("temperature out of range", 400, {"prompt": "Hi", "temperature": 3}),
    bad("an id outside the vocabulary", 400, {"prompt": [2**31 - 1]}),
    bad("a prompt that is too long", 400, {"prompt": "one two three " * 4000}),
    bad("an unknown role", 400, {"messages": [{"role": "king", "content": "Hi"}]}, CHAT),
    bad("tools", 400, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}, CHAT),
    bad("an unknown model", 404, {"model": "gpt-9", "prompt": "Hi"}),
    bad("an unknown model, streamed", 404, {"model": "gpt-9", "messages": HI, "stream": True}, CHAT),
    bad("an unknown path", 404, {}, "/v1/nothing"),
    bad("a wrong method", 405, b"", COMPLETIONS, "GET"),
)


def turns(seed: int, client: int) -> Iterator[Turn]:
    """The whole life of a client: a function of these two numbers."""
    rng = random.Random(f"{seed}/{client}")
    yield Turn(rng.uniform(0, 2), ())  # they do not all come at once
    if client == 0:  # so that whatever labels can say is said early
        yield Turn(0.0, BAD_ACTIONS)
        yield Turn(0.0, tuple(kind(rng) for kind in KINDS))
    while True:
        if rng.random() < 0.04:
            yield Turn(0.0, tuple(valid(rng, "burst") for _ in range(rng.randint(16, 32))))
        else:
            (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
            yield Turn(rng.expovariate(5), (kind(rng),))


def is_refused(rng: random.Random) -> Action:
    return rng.choice(BAD_ACTIONS)


def reads_all(rng: random.Random) -> Action:
    return valid(rng, "reads all of it")


def valid(rng: random.Random, kind: str, **fields: Any) -> Action:
    is_chat = rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 4, 8, 16, 32)), "n": rng.choices((1, 2, 3), (8, 1, 1))[0]}
    body["stream"] = rng.random() < 0.5
    body |= rng.choice(({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"seed": rng.randrange(1000)}, {}))
    extras: tuple[dict[str, Any], ...] = (
        {"stop": rng.sample([" the", "\n", "e", ". "], 2)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {str(rng.randrange(1000)): 5}},
        {"ignore_eos": True},
        {"logprobs": True, "top_logprobs": rng.randint(0, 20)} if is_chat else {"logprobs": rng.randint(0, 5)},
        {"stream_options": {"include_usage": True}} if body["stream"] else {},
    )
    for extra in extras:
        if rng.random() < 0.2:
            body |= extra
    prompts = prompts_of(rng) if not is_chat else [text(rng)]
    body |= {"messages": [{"role": "user", "content": prompts[0]}]} if is_chat else {"prompt": prompts}
    body |= fields
    num_answers = body["n"] * len(prompts)
    return Action(kind, CHAT if is_chat else COMPLETIONS, as_bytes(body), num_answers=num_answers)


def prompts_of(rng: random.Random) -> list[Any]:
    """Texts or token ids; some begin as others do, some are long."""
    num_prompts = rng.choices((1, 2), (6, 1))[0]
    if rng.random() < 0.3:
        return [[rng.randrange(100, 40_000) for _ in range(rng.randint(1, 300))] for _ in range(num_prompts)]
    return [text(rng) for _ in range(num_prompts)]


def text(rng: random.Random) -> str:
    prefix = "The same words at the start of many prompts, so that they can be shared. " * rng.choice((0, 0, 1, 4))
    return prefix + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def leaves_while_it_sends(rng: random.Random) -> Action:
    asked = valid(rng, "leaves while it sends its body")
    return with_manners(asked, body_bytes=rng.randrange(len(asked.body)), by_reset=rng.random() < 0.5)


def leaves_at_any_moment(rng: random.Random) -> Action:
    asked = valid(rng, "leaves at any moment")
    return with_manners(asked, leave_after_seconds=rng.expovariate(3), by_reset=rng.random() < 0.5)


def leaves_its_stream(rng: random.Random) -> Action:
    asked = valid(rng, "leaves its stream", stream=True)
    return with_manners(asked, leave_after_events=rng.randrange(16), by_reset=rng.random() < 0.5)


def does_not_read(rng: random.Random) -> Action:
    """More than the buffers hold, so that the server has to wait for it; some stay for so long that they are cut."""
    kind, body = "does not read", {"prompt": text(rng), "max_tokens": 120, "ignore_eos": True, "logprobs": 20}
    asked = Action(kind, COMPLETIONS, as_bytes(body | {"stream": rng.random() < 0.7}))
    return with_manners(asked, leave_after_seconds=rng.uniform(2, 8), by_reset=rng.random() < 0.5)


def with_manners(asked: Action, **manners: Any) -> Action:
    return Action(asked.kind, asked.path, asked.body, **manners)


# How often which comes, relative to the others.
KINDS: dict[Callable[[random.Random], Action], int] = {
    reads_all: 8,
    is_refused: 3,
    leaves_while_it_sends: 1,
    leaves_at_any_moment: 2,
    leaves_its_stream: 2,
    does_not_read: 1,
}


class Complaint(Exception):
    """Something that a client did not expect."""


class Clients:
    """All of them, and what they saw."""

    def __init__(self, url: str, seed: int) -> None:
        split = urlsplit(url)
        self._address = (split.hostname, split.port)
        self._seed = seed
        # Leaves a connection before the server closes it for being idle.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False)
        self.num_sent = 0  # requests that have reached a generation route
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.complaints: list[str] = []

    async def run(self, number: int, seconds: float) -> None:
        """For that long; then every client ends what it is at."""
        deadline = time.monotonic() + seconds
        async with self._http:
            await asyncio.gather(*(self._live(client, deadline) for client in range(number)))

    async def _live(self, client: int, deadline: float) -> None:
        for turn in turns(self._seed, client):
            await asyncio.sleep(min(turn.pause_seconds, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                return
            await asyncio.gather(*map(self._do, turn.actions))

    async def _do(self, action: Action) -> None:
        self.kinds[action.kind] += 1
        try:
            await (self._ask(action) if action.behaves else self._misbehave(action))
        except (httpx.HTTPError, OSError, Complaint, KeyError, ValueError) as error:
            self.complaints.append(f"{action.kind}: {type(error).__name__} {error} {action.body[:200]!r}")

    async def _ask(self, action: Action) -> None:
        headers = {"content-type": "application/json"}
        response = await self._http.request(action.method, action.path, content=action.body, headers=headers)
        self.num_sent += action.reaches_a_generation_route
        self.statuses[response.status_code] += 1
        if response.status_code not in action.statuses:
            raise Complaint(f"answered with {response.status_code} {response.text[:200]}")
        if response.status_code == 200:
            check_answer(response, action.num_answers)

    async def _misbehave(self, action: Action) -> None:
        """On a raw connection. It asks for a 100 first, so that the request has reached its route for sure."""
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        if action.by_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        with sock:
            await loop.sock_connect(sock, self._address)
            head = f"POST {action.path} HTTP/1.1\r\nhost: soak\r\ncontent-length: {len(action.body)}\r\n"
            head += "content-type: application/json\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
            await loop.sock_sendall(sock, head.encode())
            received = b""
            while len(received) < len(CONTINUE) and (more := await loop.sock_recv(sock, len(CONTINUE))):
                received += more
            if received != CONTINUE:
                raise Complaint(f"got {received[:200]!r} instead of a 100")
            self.num_sent += 1
            await loop.sock_sendall(sock, action.body[: action.body_bytes])
            if action.leave_after_seconds is not None:
                await asyncio.sleep(action.leave_after_seconds)
            elif action.leave_after_events is not None:
                num_events = 0
                while num_events <= action.leave_after_events and (more := await loop.sock_recv(sock, 4096)):
                    num_events += more.count(b"data: ")


def check_answer(response: httpx.Response, num_answers: int) -> None:
    """Raises Complaint unless every choice came, and came to its end."""
    if response.headers["content-type"] == "application/json":
        choices = response.json()["choices"]
    else:
        *chunks, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        if done != "[DONE]":
            raise Complaint(f"the stream ended with {done[:200]}")
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    if sorted(ended) != list(range(num_answers)):
        raise Complaint(f"of {num_answers} choices these ended: {sorted(ended)}")


# -- what is seen of the server ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """The server at one moment: its page of metrics, and what the system says of a process of ours."""

    at_seconds: float
    values: dict[str, float]  # by series, as on the page
    num_threads: int | None = None

    def total(self, metric: names.Metric, label: str = "") -> float:
        """Over all series of a metric, or those with that label."""
        of_metric = self.values.items()
        return sum(value for name, value in of_metric if name.partition("{")[0] == metric.name and label in name)

    @property
    def rss_mib(self) -> float:
        return self.values["process_resident_memory_bytes"] / 2**20

    @property
    def num_fds(self) -> int:
        return int(self.values["process_open_fds"])

    @property
    def blocks_used(self) -> int:
        return int(self.total(names.KV_BLOCKS, 'state="used"'))

    @property
    def num_in_engine(self) -> int:
        """Sequences that run or wait, and requests in the tokenizer."""
        return int(sum(map(self.total, (names.REQUESTS_RUNNING, names.REQUESTS_WAITING, names.TOKENIZE_QUEUE_DEPTH))))

    @property
    def label_values(self) -> set[tuple[str, str]]:
        """All that labels say, but the bounds of buckets."""
        pairs = {pair for name in self.values for pair in re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', name)}
        return {(label, value) for label, value in pairs if label != "le"}


def parse_metrics(page: str) -> dict[str, float]:
    rows = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes] | None = None  # None: not ours
    log_file: Path | None = None

    def get(self, path: str) -> str:
        """Blocks. Raises httpx.HTTPError, also where the answer is no success."""
        answer = httpx.get(self.url + path, timeout=ANSWER_SECONDS, trust_env=False, verify=False)
        return answer.raise_for_status().text

    def sample(self) -> Sample:
        return Sample(time.monotonic(), parse_metrics(self.get("/metrics")), self._num_threads())

    def _num_threads(self) -> int | None:
        if self.process is None:
            return None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("Threads:")[2].split()[0])

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                self.get("/ready")
                return
            except httpx.HTTPError as error:
                has_ended = self.process is not None and self.process.poll() is not None
                if has_ended or time.monotonic() > deadline:
                    log = self.log_file.read_text() if self.log_file is not None else ""
                    raise SystemExit(f"The server at {self.url} does not get ready: {error}\n{log}") from error
                time.sleep(0.05)

    def stop(self) -> list[str]:
        """Ends a process of ours: a sentence for each thing that is wrong with how it ended."""
        if self.process is None or self.log_file is None:
            return []
        self.process.send_signal(signal.SIGTERM)
        exit_code = self.process.wait(STOP_SECONDS)
        found = [] if exit_code == 0 else [f"The server ended with exit code {exit_code}, not 0."]
        # Errors, and whatever is no log line of ours.
        unusual = [line for line in self.log_file.read_text().splitlines() if '"level": "WARNING"' not in line]
        return [*found, f"The server printed unusual lines: {' '.join(unusual)[:2000]}"] if unusual else found


@contextmanager
def started_server() -> Iterator[Server]:
    flags = ("--port", str(port := free_port()), "--log-format", "json", "--log-level", "warning", *FLAGS)
    command = [sys.executable, "-m", "oaiserve", "serve", "demo", *flags]
    # The clients need cores, too, and threads of one operation that wait for each other would take them.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "log"
        with (
            log_file.open("wb") as log,
            subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log) as process,
        ):
            try:
                server = Server(f"http://127.0.0.1:{port}", process, log_file)
                server.wait_until_ready()
                yield server
            finally:
                process.kill()


# -- the run, and what is to be said of it ----------------------------------------------------------------------------


@dataclass
class Run:
    """`samples`: the first from before the clients came, the last from when all was quiet again."""

    samples: list[Sample]
    num_sent: int
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def gained(self, metric: names.Metric, label: str = "") -> int:
        return int(self.samples[-1].total(metric, label) - self.samples[0].total(metric, label))

    @property
    def is_settled(self) -> bool:
        before, after = self.samples[0], self.samples[-1]
        is_empty = after.num_in_engine == 0 and after.blocks_used == 0 and after.num_fds <= before.num_fds
        return is_empty and self.gained(names.REQUESTS) == self.num_sent

    @property
    def first_half(self) -> list[Sample]:
        return self.samples[: len(self.samples) // 2]

    @property
    def second_half(self) -> list[Sample]:
        return self.samples[len(self.samples) // 2 :]

    @property
    def is_long_enough_for_trends(self) -> bool:
        second = self.second_half
        return second[-1].at_seconds - second[0].at_seconds >= LEAST_SECONDS_FOR_TRENDS

    @property
    def rss_mib_per_minute(self) -> float:
        """In the second half, by least squares."""
        seconds = [sample.at_seconds for sample in self.second_half]
        return 60 * statistics.linear_regression(seconds, [sample.rss_mib for sample in self.second_half]).slope

    @property
    def new_label_values(self) -> set[tuple[str, str]]:
        """In the second half. Not new series: a rare combination of values that are known may come late."""
        known = set().union(*(sample.label_values for sample in self.first_half))
        return set().union(*(sample.label_values for sample in self.second_half)) - known


def checks(run: Run) -> Iterator[tuple[bool, str]]:
    """What must hold, and what to say if it does not."""
    before, after, num_accounted = run.samples[0], run.samples[-1], run.gained(names.REQUESTS)
    first_complaint = "".join(run.complaints[:1])
    yield not run.complaints, f"{len(run.complaints)} requests went wrong, the first one: {first_complaint}"
    yield after.num_in_engine == 0, f"{after.num_in_engine} requests are still there, though no client is."
    yield after.blocks_used == 0, f"{after.blocks_used} KV blocks are in use, though no request is there."
    yield (
        num_accounted == run.num_sent,
        f"{run.num_sent} requests reached a generation route, but {names.REQUESTS.name} grew by {num_accounted}.",
    )
    yield (
        after.num_fds <= before.num_fds,
        f"{after.num_fds} file descriptors are open; before the clients came there were {before.num_fds}.",
    )
    if run.is_long_enough_for_trends:
        new, slope = run.new_label_values, run.rss_mib_per_minute
        yield not new, f"In the second half labels took values that they had not had before: {sorted(new)}."
        yield (
            slope <= MOST_RSS_MIB_PER_MINUTE,
            f"In the second half memory grew by {slope:.1f} MiB a minute; {MOST_RSS_MIB_PER_MINUTE} is the limit.",
        )


def failures(run: Run) -> list[str]:
    return [sentence for holds, sentence in checks(run) if not holds]


async def soak(server: Server, seed: int, seconds: float, num_clients: int) -> Run:
    clients, samples = Clients(server.url, seed), [server.sample()]
    load = asyncio.create_task(clients.run(num_clients, seconds))
    while not load.done():
        samples.append(await asyncio.to_thread(server.sample))
        await asyncio.wait([load], timeout=SAMPLE_SECONDS)
    load.result()
    samples.append(server.sample())
    run = Run(samples, clients.num_sent, clients.kinds, clients.statuses, clients.complaints)
    deadline = time.monotonic() + IDLE_SECONDS
    # The last steps, records and connections may need a moment to end.
    while not run.is_settled and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        run.samples[-1] = server.sample()
    return run


def report(run: Run) -> str:
    """Markdown."""
    samples, half = run.samples, len(run.samples) // 2

    def course(name: str, values: Sequence[float]) -> str:
        return f"| {name} | {values[0]:,.0f} | {values[half]:,.0f} | {max(values):,.0f} | {values[-1]:,.0f} |"

    num_bad = sum(number for kind, number in run.kinds.items() if kind.startswith("bad"))
    kinds = sorted((kind, number) for kind, number in run.kinds.items() if not kind.startswith("bad"))
    sums = [
        ("requests that reached a generation route", run.num_sent),
        (f"requests in `{names.REQUESTS.name}`", run.gained(names.REQUESTS)),
        *((f"... {outcome}", run.gained(names.REQUESTS, f'outcome="{outcome}"')) for outcome in Outcome),
        ("tokens generated", run.gained(names.GENERATION_TOKENS)),
        ("preemptions", run.gained(names.PREEMPTIONS)),
        *((f"client: {kind}", number) for kind, number in [*kinds, ("bad request", num_bad)]),
        *((f"answers with {status}", number) for status, number in sorted(run.statuses.items())),
    ]
    threads = [sample.num_threads for sample in samples if sample.num_threads is not None]
    return "\n".join(
        [
            "| | before | half time | most | after |",
            "|---|---|---|---|---|",
            course("RSS, MiB", [sample.rss_mib for sample in samples]),
            course("open file descriptors", [sample.num_fds for sample in samples]),
            *([course("threads", threads)] if threads else []),
            course("series on `/metrics`", [len(sample.values) for sample in samples]),
            course("label values on `/metrics`", [len(sample.label_values) for sample in samples]),
            course("sequences running", [sample.total(names.REQUESTS_RUNNING) for sample in samples]),
            course("sequences waiting", [sample.total(names.REQUESTS_WAITING) for sample in samples]),
            course("KV blocks used", [sample.blocks_used for sample in samples]),
            "",
            "| | |",
            "|---|---|",
            f"| RSS in the second half, MiB a minute | {run.rss_mib_per_minute:+.2f} |",
            *(f"| {name} | {number:,} |" for name, number in sums),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--url", help="of a server that serves nobody else; it is not stopped")
    arguments = parser.parse_args(argv)
    with nullcontext(Server(arguments.url)) if arguments.url else started_server() as server:
        run = asyncio.run(soak(server, arguments.seed, 60 * arguments.minutes, arguments.clients))
        print(report(run))
        failed = failures(run) + server.stop()
    for sentence in failed:
        print(sentence, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
