"""Kills and stops servers in mid-stream, and compares each stream with an undisturbed one: python -m tools.kills

Each round, the server with the most of the streams gets a SIGKILL, or a SIGSTOP. What it prints is of all rounds in the
file. A pause is the longest time without bytes of a stream that went on elsewhere, as its client saw it; what it takes
to compute its prompt again is part of it. With --short, a server is killed while clients ask for one short stored
answer after the other: then a server may end after it has stored a response and before its client has it. All servers
have one store. With --ray, Ray Serve starts the servers and replaces those that were killed. With --replicas or
--models, there is one server with as many engine processes, of one model or of as many. They get a SIGKILL, a SIGSEGV
or a SIGABRT, their executor raises an error, or with --stops they are stopped until the server kills them: in turns,
and at most twice a minute each, because one more would be too many. The exit code is 1 if a stream was broken, has
other bytes, or is not stored.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import sys
import threading
import time
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import pairwise
from multiprocessing.context import ForkServerContext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil

from loadtest.intervals import percentile
from loadtest.metrics_page import values_of
from tools.server_process import exit_on_sigterm, free_port, running_process

SERVERS = 3
STREAMS = 8
ENDS_SECONDS = 61  # within which a replica may end twice
EXECUTOR_ERROR = signal.SIGUSR1  # After this, the executor of an engine process raises an error.
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, EXECUTOR_ERROR)
HANG_LOOK_NS = 150_000_000  # A server looks so often whether an engine process hangs, and kills it after 60 looks.
TOKENS = 150
KEY = "a-key"  # the key of all servers
NAMES = ("small",)
OF_ANY = ("--kv-cache-memory", "64MiB", "--cpu-threads", "1", "--trusted-proxy", "127.0.0.1", "--log-level", "warning",
          "--api-key", KEY)  # fmt: skip
FLAGS = (*OF_ANY, "--served-model-name", *NAMES)
# What a server imports, so that it starts in a moment.
PRELOADED = [*(f"oaiserve.{name}" for name in ("cli", "app", "engine.engine", "engine.start.ways.described")),
             "transformers.models.auto.tokenization_auto"]  # fmt: skip
MANY = {"type": "array", "items": {"type": "integer"}, "minItems": 200}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": MANY}}
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"a": MANY}, "required": ["a"]}},
}
ASKED = {"messages": [{"role": "user", "content": "Tell me of the old river. " * 8}]}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, ASKED | {"temperature": 0}),
    (CHAT, ASKED | {"presence_penalty": 0.4, "repetition_penalty": 1.1, "logprobs": True, "top_logprobs": 2}),
    (CHAT, ASKED | {"n": 2, "temperature": 0.8, "stream_options": {"include_usage": True}}),
    (CHAT, ASKED | {"response_format": SCHEMA}),
    (CHAT, ASKED | {"response_format": SCHEMA, "stream": False}),
    (CHAT, ASKED | {"tools": [TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": "Once upon a time. " * 20, "return_token_ids": True, "logprobs": 2}),
    (RESPONSES, {"input": "Tell me of seven hills. " * 8, "store": False}),
    ("/v1/messages", ASKED),
    ("/v1/messages", ASKED | {"stream": False}),
    (RESPONSES, {"input": "Tell me of seven hills. " * 8}),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 1}),
)
SHORT = len(CASES) - 1


def image_case() -> tuple[str, dict[str, Any]]:
    from tests.models.pictures import picture, png

    url = f"data:image/png;base64,{b64encode(png(picture(1))).decode()}"
    parts = [{"type": "text", "text": "What is this? "}, {"type": "image_url", "image_url": {"url": url}}]
    return CHAT, {"messages": [{"role": "user", "content": parts}], "temperature": 0.5}


TEXTS = (
    "text",
    "content",
    "delta",
    "arguments",
)  # Their pieces are joined: tokens that wait for a reader come in one event.
BY_TIME_OR_CACHE = ("created", "created_at", "completed_at", "sequence_number", "cached_tokens", "input_tokens",
                    "cache_read_input_tokens", "cache_creation_input_tokens", "cache_write_tokens")  # fmt: skip


def make_model(folder: Path) -> None:
    from tests.engine.remembered import save
    from tests.models.decoders import random_model
    from tests.models.small_configs import config_of

    save(random_model(config_of("llama", vocab_size=2048, max_position_embeddings=2048)), folder, 2048)


def make_seeing_model(folder: Path) -> None:
    import torch

    from tests.plugins.media.seeing import KINDS, save_whole

    sizes = {"vocab_size": 2048, "max_position_embeddings": 2048}
    save_whole("llava", KINDS["llava"]._replace(text=sizes), folder, torch.float32)


def serve(model: Path, port: int, *flags: str) -> None:
    from oaiserve import cli

    sys.exit(cli.main(["serve", str(model), "--port", str(port), *FLAGS, *flags]))


def preloaded(model: Path, make_model: Callable[[Path], None] = make_model) -> ForkServerContext:
    """Make a small model in a folder, and return what starts processes that serve it in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    make = context.Process(target=make_model, args=(model,))
    make.start()
    make.join()
    return context


def serve_replicas(model: Path, port: int, *flags: str) -> None:
    prepare_engine_processes()
    serve(model, port, *flags)


def prepare_engine_processes() -> None:
    """Let engine processes of this process take `EXECUTOR_ERROR`, and be killed soon when they hang."""
    from oaiserve.process import child, replica

    child.PROGRAM = ("-m", "tools.kills")
    replica.LOOK_NS = HANG_LOOK_NS


def be_engine_process(argv: Sequence[str]) -> int:
    from oaiserve import cli
    from oaiserve.engine import engine

    has_come = threading.Event()
    signal.signal(EXECUTOR_ERROR, lambda number, frame: has_come.set())
    module: Any = engine
    start_model = module.start_model

    def with_errors(*parameters: Any, **additions: Any) -> Any:
        model = start_model(*parameters, **additions)
        launch = model.runner.launch

        def launch_or_fail(step: Any) -> Any:
            if has_come.is_set():
                raise RuntimeError("the device is gone")
            return launch(step)

        model.runner.launch = launch_or_fail
        return model

    module.start_model = with_errors
    return cli.main(argv)


def serve_models(model: Path, port: int, names: Sequence[str], *flags: str) -> None:
    from oaiserve import cli

    prepare_engine_processes()
    named = [f"{name}={model}" for name in names]
    sys.exit(cli.main(["serve", *named, "--port", str(port), *OF_ANY, *flags]))


def stream(http: httpx.Client, case: int, seed: int, came: list[float], names: Sequence[str]) -> bytes:
    """Return the bytes of a stream, and note when each piece came. A whole answer becomes a stream of one event."""
    path, body = CASES[case] if case < len(CASES) else image_case()
    limit: dict[str, Any] = {
        "max_output_tokens" if "input" in body else "max_tokens": TOKENS,
        "seed": seed,
        "ignore_eos": True,
    }
    limit["model"] = names[case % len(names)]
    content = b"" if body.get("stream", True) else b"data: "
    with http.stream("POST", path, json=limit | {"stream": True} | body) as answer:
        for part in answer.iter_raw():
            came.append(time.monotonic())
            content += part
    return content


def meaning(content: bytes) -> dict[tuple[str, ...], Any]:
    """Return the content of a stream without its ids and times, however it is divided into events."""
    joined: dict[tuple[str, ...], Any] = {}

    def note(path: tuple[str, ...], value: Any) -> None:
        if path[-1] in BY_TIME_OR_CACHE:
            return
        if isinstance(value, dict):
            for name, each in value.items():
                note((*path, f"{value.get('index')}", name), each)
        elif isinstance(value, list) and path[-1] in ("choices", "tool_calls"):
            for each in value:
                note(path, each)
        elif isinstance(value, list) or (isinstance(value, str) and path[-1] in TEXTS):
            joined[path] = joined.get(path, type(value)()) + value
        else:
            joined.setdefault(path, set()).add(value)

    for text in re.findall(rb"^data: (\{.*)$", re.sub(rb"(?<=[a-z][-_])[0-9a-f]{32}", b"ID", content), re.MULTILINE):
        event = json.loads(text)
        note((event.get("type", ""),), event)
    return joined


class Fleet:
    """Some servers, a gateway before them, and the meanings of undisturbed streams."""

    _num_servers = SERVERS
    _num_streams = STREAMS
    _names: Sequence[str] = NAMES
    _kill_signals: tuple[signal.Signals, ...] = (signal.SIGKILL,)
    _num_cases = len(CASES)
    _make_model = staticmethod(make_model)

    def __init__(self, stack: ExitStack) -> None:
        self._model = Path(stack.enter_context(TemporaryDirectory()))
        self._context = preloaded(self._model, self._make_model)
        self._store = Path(stack.enter_context(TemporaryDirectory())) / "responses.db"
        url = self._front(stack)
        headers = {"authorization": f"Bearer {KEY}"}
        client = httpx.Client(base_url=url, headers=headers, timeout=120, trust_env=False)
        self._http = stack.enter_context(client)
        self._alone: dict[tuple[int, int], Any] = {}
        self._wait_until_up()

    def _front(self, stack: ExitStack) -> str:
        """Start everything, and return the URL for clients."""
        replicas = [word for url in self._start(stack) for word in ("--replica", url)]
        port = free_port()
        command = [sys.executable, "-m", "oaiserve", "route", *replicas, "--port", str(port)]
        env = os.environ | {"OAISERVE_REPLICA_KEY": KEY}
        return stack.enter_context(running_process(command, port, env=env)).url

    def _start(self, stack: ExitStack) -> list[str]:
        """Start the servers, and return the URLs for the gateway."""
        self._ports = sorted(free_port() for _ in range(SERVERS))  # the gateway numbers them so
        self._servers = [self._started(port) for port in self._ports]
        stack.callback(lambda: [server.kill() for server in self._servers])
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def _busiest(self) -> int:
        """Return the number of the server with the most open requests."""
        opened = self._metric("open_requests")
        return opened.index(max(opened))

    def _pid(self, number: int) -> int:
        pid: int = self._servers[number].pid
        return pid

    def _started(self, port: int) -> Any:
        server = self._context.Process(target=serve, args=(self._model, port, "--response-store", str(self._store)))
        server.start()
        return server

    def _metric(self, name: str) -> list[float]:
        return values_of(self._http.get("/metrics").text, f"oaiserve_gateway_{name}")

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + 120
        while sum(self._metric("replica_up")) < self._num_servers:
            assert time.monotonic() < deadline, "a server does not come back"
            time.sleep(0.1)

    def round(self, rng: random.Random, is_kill: bool) -> dict[str, Any]:
        """Disturb a server in mid-stream, and return what became of the streams."""
        cases = [(rng.randrange(self._num_cases), rng.randrange(4)) for _ in range(self._num_streams)]
        for each in cases:
            if each not in self._alone:
                self._alone[each] = meaning(stream(self._http, *each, [], self._names))
        came: list[list[float]] = [[] for _ in cases]
        before = sum(self._metric("continued_total"))
        most = self._num_streams * rng.randint(1, 40)
        with ThreadPoolExecutor(self._num_streams) as threads:
            reading = [
                threads.submit(stream, self._http, *each, own, self._names)
                for each, own in zip(cases, came, strict=True)
            ]
            while sum(map(len, came)) < most and not all(each.done() for each in reading):
                time.sleep(0.001)
            number = self._busiest()
            os.kill(self._pid(number), rng.choice(self._kill_signals) if is_kill else signal.SIGSTOP)
            answers = [each.result() for each in reading]
        num_lost = int(sum(self._metric("continued_total")) - before)
        self._revive(number, is_kill=is_kill)
        pauses = sorted(max((b - a for a, b in pairwise(own)), default=0.0) for own in came)[
            self._num_streams - num_lost :
        ]
        return self._judged(cases, answers) | {"lost": num_lost, "pauses": pauses}

    def short_round(self, rng: random.Random) -> dict[str, Any]:
        """Kill a server among short stored answers, just when one has been stored, and return what became of them."""
        case = (SHORT, 0)
        before = sum(self._metric("continued_total"))
        most = rng.randint(20, 200)
        if case not in self._alone:
            self._alone[case] = meaning(stream(self._http, *case, [], self._names))
        answers: list[bytes] = []
        is_killed = threading.Event()

        def ask() -> None:
            while not is_killed.is_set():
                answers.append(stream(self._http, *case, [], self._names))

        with ThreadPoolExecutor(STREAMS) as threads:
            asking = [threads.submit(ask) for _ in range(STREAMS)]
            while len(answers) < most and not any(map(_is_done, asking)):
                time.sleep(0.0001)
            number = rng.randrange(SERVERS)
            with closing(sqlite3.connect(f"file:{self._store}?mode=ro", uri=True)) as store:
                count = store.execute("PRAGMA data_version").fetchone()  # Each write changes this number.
                while store.execute("PRAGMA data_version").fetchone() == count and not any(map(_is_done, asking)):
                    pass
            os.kill(self._pid(number), signal.SIGKILL)
            is_killed.set()
            for each in asking:
                each.result()
        num_lost = int(sum(self._metric("continued_total")) - before)
        self._revive(number, is_kill=True)
        ids = {match[1].decode() for one in answers if (match := re.search(rb'"id":"(resp_[0-9a-f]+)"', one))}
        lost = [each for each in ids if self._http.get(f"{RESPONSES}/{each}").status_code != 200]
        verdict = self._judged([case] * len(answers), answers)
        verdict["differing"] += [(*case, f"{each} is not stored") for each in lost]
        return verdict | {"lost": num_lost, "pauses": []}

    def _revive(self, number: int, *, is_kill: bool) -> None:
        if is_kill:
            self._servers[number].join()
            self._servers[number] = self._started(self._ports[number])
        else:
            os.kill(self._pid(number), signal.SIGCONT)
        self._wait_until_up()

    def _judged(self, asked: list[tuple[int, int]], answers: list[bytes]) -> dict[str, Any]:
        wrong = [(*each, one.decode()) for each, one in zip(asked, answers, strict=True)
                 if meaning(one) != self._alone[each]]  # fmt: skip
        broken = sum(b'"error":{' in one for one in answers)
        return {"streams": len(answers), "broken": broken, "differing": wrong}


class RayFleet(Fleet):
    """Servers that Ray Serve starts and replaces, on two nodes that are both this machine. Ports name them."""

    def _start(self, stack: ExitStack) -> list[str]:
        from tests.plugins.ray.ray_cluster.local import start_local

        self._cluster = stack.enter_context(start_local(num_cpus=2))
        settings = {
            "kv_cache_memory": "64MiB",
            "cpu_threads": 1,
            "trusted_proxy": ["0.0.0.0/0"],
            "log_level": "warning",
            "served_model_name": "small",
            "response_store": str(self._store),
            "api_key": KEY,
        }
        self._cluster.deploy(SERVERS, model=str(self._model), **settings)
        self._cluster.wait_until(lambda: len(self._cluster.replicas()) == SERVERS, "the start")
        return [self._cluster.list_url]

    def _busiest(self) -> int:
        with self._http.stream("GET", "/dashboard/feed") as feed:
            text = next(line for line in feed.iter_lines() if line.startswith("data: "))
        replicas = json.loads(text.removeprefix("data: "))["fleet"]["replicas"]
        busiest = max(replicas, key=lambda replica: replica["num_open"])
        return int(busiest["address"].rpartition(":")[2])

    def _pid(self, number: int) -> int:
        return self._cluster.pid_of(number)

    def _revive(self, number: int, *, is_kill: bool) -> None:
        def is_replaced() -> bool:
            ports = self._cluster.replicas().values()
            return number not in ports and len(ports) == SERVERS

        if not is_kill:
            os.kill(self._pid(number), signal.SIGCONT)
        else:
            self._cluster.wait_until(is_replaced, "the replacement")
        self._wait_until_up()


class EngineFleet(Fleet):
    """One server with several engine processes."""

    _kill_signals = SIGNALS
    _num_cases = len(CASES) + 1  # with an image
    _make_model = staticmethod(make_seeing_model)

    def __init__(self, stack: ExitStack, num_replicas: int, num_streams: int) -> None:
        self._num_servers = num_replicas
        self._num_streams = num_streams
        self._continued: set[str] = set()
        self._killed: list[deque[float]] = [deque([-ENDS_SECONDS] * 2, maxlen=2) for _ in range(num_replicas)]
        super().__init__(stack)

    def _front(self, stack: ExitStack) -> str:
        port = free_port()
        server = self._begun(port, "--response-store", str(self._store), "--recent-requests", "1000")
        server.start()
        stack.callback(server.terminate)
        self._server = psutil.Process(server.pid)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 300
        while True:
            try:
                httpx.get(url, trust_env=False)
                return url
            except httpx.ConnectError:
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.1)

    def _begun(self, port: int, *flags: str) -> Any:
        arguments = (self._model, port, "--replicas", str(self._num_servers), *flags)
        return self._context.Process(target=serve_replicas, args=arguments)

    def _metric(self, name: str) -> list[float]:
        if name == "continued_total":
            rows = self._http.get("/debug/requests?limit=1000").json()["requests"]
            self._continued |= {row["request_id"] for row in rows if row.get("engine_restart_ns")}
            return [len(self._continued)]
        return values_of(self._http.get("/metrics").text, f"oaiserve_{name}")

    def _busiest(self) -> int:
        """Return the number of the process that ended longest ago, once it may end again."""
        while True:
            may = [number for number, ends in enumerate(self._killed) if time.monotonic() - ends[0] > ENDS_SECONDS]
            if may:
                break
            time.sleep(0.1)
        number = min(may, key=lambda number: self._killed[number][-1])
        self._killed[number].append(time.monotonic())
        return number

    def _pid(self, number: int) -> int:
        name = self._process_name(number)
        pid: int = next(child.pid for child in self._server.children() if child.cmdline()[-1] == name)
        return pid

    def _process_name(self, number: int) -> str:
        return f"replica {number}"

    def _revive(self, number: int, *, is_kill: bool) -> None:
        self._wait_until_up()
        self._killed[number][-1] = time.monotonic()  # A process that was stopped has ended later.


class ModelsFleet(EngineFleet):
    """One server with several models, each with an engine process."""

    def __init__(self, stack: ExitStack, num_models: int, num_streams: int) -> None:
        self._names = [f"small-{number}" for number in range(num_models)]
        super().__init__(stack, num_models, num_streams)

    def _begun(self, port: int, *flags: str) -> Any:
        return self._context.Process(target=serve_models, args=(self._model, port, self._names, *flags))

    def _metric(self, name: str) -> list[float]:
        return super()._metric("model_loaded" if name == "replica_up" else name)

    def _process_name(self, number: int) -> str:
        return self._names[number]


def _is_done(asking: Future[None]) -> bool:
    return asking.done()


def summary(name: str, rounds: list[dict[str, Any]]) -> str:
    pauses = [pause for one in rounds for pause in one["pauses"]] or [0.0]
    num_streams = sum(one["streams"] for one in rounds)
    num_lost = sum(one["lost"] for one in rounds)
    broken = sum(one["broken"] for one in rounds)
    wrong = sum(len(one["differing"]) for one in rounds)
    shown = ", ".join(f"{percentile(sorted(pauses), share):.2f}" for share in (50, 99, 100))
    return (
        f"{len(rounds):,} {name}: {num_streams:,} streams, {num_lost:,} went on elsewhere, "
        f"{broken} broken, {wrong} with other bytes; pauses p50, p99 and longest: {shown} s"
    )


def main() -> int:
    if sys.argv[1:2] == ["engine-process"]:
        return be_engine_process(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=0)
    parser.add_argument("--short", type=int, default=0, help="kills among short stored answers")
    parser.add_argument("--ray", action="store_true", help="have Ray Serve start the servers; without --short")
    parser.add_argument("--replicas", type=int, default=0, help="one server with as many engine processes")
    parser.add_argument("--streams", type=int, default=STREAMS, help="with --replicas or --models: streams at a time")
    parser.add_argument("--models", type=int, default=0, help="one server with as many models")
    parser.add_argument("--rounds", type=Path, required=True, help="a line for each round is added to this file")
    arguments = parser.parse_args()
    exit_on_sigterm()
    rng = random.Random(arguments.seed)
    kinds = ["kills"] * arguments.kills + ["stops"] * arguments.stops + ["kills among short answers"] * arguments.short
    rng.shuffle(kinds)
    with ExitStack() as stack, arguments.rounds.open("a") as file:
        fleet: Fleet
        if arguments.replicas:
            fleet = EngineFleet(stack, arguments.replicas, arguments.streams)
        elif arguments.models:
            fleet = ModelsFleet(stack, arguments.models, arguments.streams)
        else:
            fleet = RayFleet(stack) if arguments.ray else Fleet(stack)
        for kind in kinds:
            is_short = kind == "kills among short answers"
            verdict = fleet.short_round(rng) if is_short else fleet.round(rng, kind == "kills")
            print(json.dumps(verdict | {"kind": kind}), file=file, flush=True)
    rounds = [json.loads(line) for line in arguments.rounds.read_text().splitlines()]
    for kind in sorted({one["kind"] for one in rounds}):
        print(summary(kind, [one for one in rounds if one["kind"] == kind]))
    return int(any(one["broken"] or one["differing"] for one in rounds))


if __name__ == "__main__":
    sys.exit(main())
