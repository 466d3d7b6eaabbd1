"""Engines of other kinds, which answer with the bytes that a test gives them, and a gateway in front of them.

The answers of Ollama and SGLang are made from their sources, those of vLLM and llama.cpp from running servers.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.applications import Starlette

from oaiserve.config import ServerOptions
from oaiserve.plugin import Plugin
from oaiserve.plugins.gateway.address import Address
from oaiserve.plugins.gateway.engines.app import create_engine_gateway
from oaiserve.plugins.gateway.engines.fleet import Fleet
from oaiserve.plugins.gateway.options import EnginesOptions, RouteOptions
from tests.world.loop import Process
from tests.world.network import End
from tests.world.serving import IP, Place, PlacedServer

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CUT = object()  # ends the connection
Part = bytes | float | object  # bytes to send, seconds to wait, CUT, or a function whose result is awaited


def whole(content: Any, status: bytes = b"200 OK", kind: bytes = b"application/json", more: bytes = b"") -> list[Part]:
    """Return an answer with this body: bytes, or an object for JSON."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n" % (status, kind, more, len(body))
    return [head + body]


def stream(*parts: Part, kind: bytes = b"text/event-stream", more: bytes = b"") -> list[Part]:
    """Return a chunked answer, each part of which is a chunk."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%btransfer-encoding: chunked\r\n\r\n" % (kind, more)
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) if isinstance(part, bytes) else part for part in parts]
    return [head, *chunks, *([] if CUT in parts else [b"0\r\n\r\n"])]


def event(content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def piece(text: str, **more: Any) -> bytes:
    return event({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": {"content": text}, **more}]})


DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = stream(piece("Hel"), 0.1, piece("lo", finish_reason="stop"), event({"choices": [], "usage": USAGE}), DONE)
MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "someone"}]}


def models(**more: Any) -> list[Part]:
    return whole({"object": "list", "data": [{"id": "m", "object": "model", **more}]})


LLAMA_CPP = {
    "/v1/models": models(owned_by="llamacpp", meta={"n_ctx_train": 32768}),
    "/props": whole({"default_generation_settings": {"n_ctx": 4096}, "total_slots": 4, "build_info": "b7000-abc"}),
    "/metrics": whole(b"# TYPE llamacpp:requests_deferred gauge\nllamacpp:requests_deferred 0\n", kind=b"text/plain"),
}
VLLM = {
    "/v1/models": models(owned_by="vllm", max_model_len=8192),
    "/version": whole({"version": "0.33.0"}),
    "/metrics": whole(b'# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine="0"} 0.0\n'),
}
SGLANG = {
    "/v1/models": models(owned_by="sglang", max_model_len=4096),
    "/get_server_info": whole({"version": "0.5.23", "context_length": 4096}),
    "/metrics": whole(b"not enabled", b"404 Not Found", b"text/plain"),
}
OLLAMA = {
    "/v1/models": models(owned_by="library"),
    "/api/version": whole({"version": "0.40.12"}),
    "/api/ps": whole({"models": [{"name": "other", "context_length": 9}, {"name": "m", "context_length": 4096}]}),
}


@dataclass
class Asked:
    """A request that an engine got."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]


@dataclass
class RawEngine:
    """Answers by path, and with 404 to all other paths."""

    place: Place
    answers: dict[str, Sequence[Part]] = field(default_factory=lambda: {"/v1/models": whole(MODELS)})
    asked: list[Asked] = field(default_factory=list)
    num_left: int = 0  # requests whose client left before the end of the answer

    def __post_init__(self) -> None:
        self.address = Address(IP, self.place.new_port(), "raw")
        self.start()

    @property
    def url(self) -> str:
        return f"http://{self.address.name}"

    def start(self) -> None:
        self._process = Process(self.place.world, self.address.name, IP)
        self.place.network.listeners[IP, self.address.port] = (self._process, self._accept)

    def kill(self) -> None:
        self.place.network.kill(self._process, "kill")

    def questions(self, path: str = CHAT) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.startswith(path)]

    def _accept(self, end: End) -> None:
        world = self.place.world
        end.attach(asyncio.StreamReaderProtocol(asyncio.StreamReader(loop=world), self._serve, loop=world))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, ConnectionError):
            while line := (await reader.readline()).strip().decode():
                headers: dict[str, str] = {}
                while head := (await reader.readline()).strip().decode():
                    name, _, value = head.partition(": ")
                    headers[name] = f"{headers[name]}, {value}" if name in headers else value
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.asked.append(asked := Asked(line, headers, body))
                answer = self.answers.get(asked.path.partition("?")[0], whole(b"no such path", b"404 Not Found"))
                for part in answer:
                    if part is CUT:
                        return
                    if callable(part):
                        await part()
                    elif isinstance(part, float):
                        await asyncio.sleep(part)
                    elif isinstance(part, bytes):
                        writer.write(part)
                        try:
                            await writer.drain()
                        except ConnectionError:
                            self.num_left += 1
                            return


def body_of(answer: Sequence[Part]) -> bytes:
    """Return the bytes of the body of an answer that `stream` has made."""
    return b"".join(part.split(b"\r\n", 1)[1][:-2] for part in answer[1:] if isinstance(part, bytes))


@dataclass
class Front:
    """A gateway in front of engines, and a client."""

    place: Place
    app: Starlette
    fleet: Fleet
    server: PlacedServer
    http: httpx.Client

    def chat(self, **more: Any) -> httpx.Response:
        return self.http.post(CHAT, json=ASK | more.pop("body", {}), **more)

    def account(self, request_id: str) -> dict[str, Any]:
        """Return the account of a request, whose phases add up to its time exactly."""
        self.settle(0.2)  # The telemetry thread takes records in batches.
        found: dict[str, Any] = self.http.get(f"/debug/requests/{request_id}").json()
        phases = found["phases"]
        assert sum(phase["duration_ns"] for phase in phases) == found["duration_ns"]
        starts = [phase["start_ns"] for phase in phases]
        assert starts == [sum(phase["duration_ns"] for phase in phases[:place]) for place in range(len(phases))]
        return found

    def metric(self, name: str, *labels: str) -> float:
        """Return the sum of the series of a metric that have these labels."""
        self.settle(0.2)
        lines = self.http.get("/metrics").text.splitlines()
        found = [
            line for line in lines if line.startswith((f"{name} ", f"{name}{{")) and all(x in line for x in labels)
        ]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def listed(self, **headers: str) -> list[dict[str, Any]]:
        """Return the accounts of all ended requests, the newest first."""
        self.settle(0.2)
        found: list[dict[str, Any]] = self.http.get("/debug/requests", headers=headers).json()["requests"]
        return found

    def settle(self, seconds: float = 1.0) -> None:
        self.place.world.settle(seconds)


@contextmanager
def before(
    place: Place, *engines: RawEngine | str, plugins: Sequence[Plugin] | None = None, **options: Any
) -> Iterator[Front]:
    """Run a gateway in front of engines or URLs, and wait until it has looked at them."""

    async def resolve(url: str) -> list[Address]:
        host, _, port = url.removeprefix("http://").partition("/")[0].partition(":")
        return [Address(host, int(port), f"{host}:{port}")]

    urls = tuple(engine if isinstance(engine, str) else engine.url for engine in engines)
    settings = EnginesOptions(engine=urls, **options)
    app, fleet = create_engine_gateway(RouteOptions(), settings, resolve=resolve, plugins=plugins, runtime=place.world)
    server = ServerOptions(drain_timeout_seconds=0)
    with ExitStack() as stack:
        placed = stack.enter_context(PlacedServer(place, app, server, on_drain=fleet.drain))
        http = stack.enter_context(place.plain(placed.url))
        place.world.settle(2.5)
        yield Front(place, app, fleet, placed, http)
        for engine in engines:
            if isinstance(engine, RawEngine):
                engine.kill()
