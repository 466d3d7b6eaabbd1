"""Measures what streaming costs the engine's process, with and without front ends: python -m tools.front_ends

The server is real, with a device double that computes nothing, or takes a set time for a step. Printed is the CPU time
of each streamed token, in the engine's process and in all others of the server, and tokens per second; and, for a light
load at a set pace, the times to the first token and between tokens, as a client sees them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from time import monotonic_ns, process_time_ns
from urllib.parse import urlsplit

from oaiserve.config import EngineOptions
from oaiserve.engine.engine import Engine
from oaiserve.engine.request import TERMINAL, Event, Request, SamplingParams, TokenPrompt
from oaiserve.engine.served_model import ServedModel
from oaiserve.engine.text.tokenizer import Tokenizer
from tests.models.decoders import byte_tokenizer
from tools.host_time import DeviceDouble
from tools.markdown import as_markdown
from tools.server_process import ServerProcess, exit_on_sigterm, running_oaiserve

MAX_MODEL_LEN = 4096
STEP_MS = "OAISERVE_TOOL_STEP_MS"  # would be refused as an unknown variable, if it were not taken away


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        return serve(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=100_000, help="tokens of each run, of all streams together")
    parser.add_argument("--step-ms", type=float, default=0, help="time of a step (default 0: as fast as the host can)")
    parser.add_argument("--front-ends", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--light", type=int, default=300, help="tokens of each of four streams, at 10 ms a step")
    arguments = parser.parse_args()
    exit_on_sigterm()
    rows = [["streams", "front ends", "engine's process, µs/token", "other processes, µs/token", "tokens/s"]]
    for number in arguments.streams:
        alone = engine_alone(number, max(1, arguments.tokens // number), arguments.step_ms)
        rows.append([str(number), "the engine alone", f"{alone.own_us:.1f}", "", f"{alone.tokens_per_second:,.0f}"])
    for number_of_front_ends in arguments.front_ends:
        with serving(number_of_front_ends, arguments.step_ms) as server:
            run(server, 64, 50)  # warms up
            for number in arguments.streams:
                cost = run(server, number, max(1, arguments.tokens // number))
                rows.append(
                    [
                        str(number),
                        str(number_of_front_ends),
                        f"{cost.own_us:.1f}",
                        f"{cost.others_us:.1f}",
                        f"{cost.tokens_per_second:,.0f}",
                    ]
                )
    print("\n".join(as_markdown(rows)), flush=True)
    rows = [["front ends", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"]]
    for number_of_front_ends in arguments.front_ends if arguments.light else ():
        with serving(number_of_front_ends, step_ms=10) as server:
            run(server, 4, 20)
            first, gaps = light(server, arguments.light)
            shown = [statistics.median(first), quantile(first, 0.99), statistics.median(gaps), quantile(gaps, 0.99)]
            rows.append([str(number_of_front_ends), *(f"{seconds * 1e3:.2f}" for seconds in shown)])
    if arguments.light:
        print("\n" + "\n".join(as_markdown(rows)), flush=True)


@dataclass(frozen=True)
class Cost:
    own_us: float  # CPU time of the engine's process, for a token
    others_us: float  # that of the front ends
    tokens_per_second: float


def engine_alone(num_streams: int, num_tokens: int, step_ms: float) -> Cost:
    """Run an engine in this process whose events nobody looks at, but for their end."""
    ends: SimpleQueue[int] = SimpleQueue()

    def deliver(events: list[Event]) -> None:
        if num_ended := sum(isinstance(event, TERMINAL) for event in events):
            ends.put(num_ended)

    with make_engine(step_ms) as engine:
        began_ns, cpu_ns = monotonic_ns(), process_time_ns()
        for number in range(num_streams):
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0)
            engine.submit(Request(str(number), (TokenPrompt([1, 2, 3, number % 256]),), params), deliver)
        num_left = num_streams
        while num_left:
            num_left -= ends.get()
        spent_ns, took_ns = process_time_ns() - cpu_ns, monotonic_ns() - began_ns
    total = num_streams * num_tokens
    return Cost(spent_ns / total / 1e3, 0, total / took_ns * 1e9)


def make_engine(step_ms: float, options: EngineOptions | None = None) -> Engine:
    most = 1024
    return Engine(
        ServedModel(
            tokenizer=Tokenizer(byte_tokenizer()),
            runner=DeviceDouble(int(step_ms * 1e6)),
            num_blocks=most * MAX_MODEL_LEN // 16,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=256,
        ),
        options or EngineOptions(max_running=most, max_step_tokens=8 * most, max_waiting=2 * most),
    )


def serve(arguments: list[str]) -> None:
    """Run the server with the device double in place of a model."""
    from oaiserve import cli

    step_ms = float(os.environ.pop(STEP_MS))
    Engine.from_pretrained = lambda model, options, **_: make_engine(step_ms, options)  # type: ignore[method-assign]
    sys.exit(cli.main(arguments))


@contextmanager
def serving(front_ends: int, step_ms: float) -> Iterator[ServerProcess]:
    flags = ["--front-ends", str(front_ends), "--max-running", "1024", "--max-step-tokens", "8192"]
    flags += ["--max-waiting", "2048", "--log-level", "warning", "--max-connections-per-address", "0"]
    environment = os.environ | {STEP_MS: str(step_ms)}
    with running_oaiserve(*flags, program=("-m", "tools.front_ends"), env=environment) as server:
        yield server


@dataclass
class Stream(asyncio.Protocol):
    """A client that counts what it reads, as cheaply as Python can."""

    request: bytes
    ended: asyncio.Future[None]
    begun_ns: int = 0
    read_ns: list[int] = field(default_factory=list)
    tail: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.begun_ns = monotonic_ns()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        if b"data: {" in data:
            self.read_ns.append(monotonic_ns())
        self.tail = (self.tail + data)[-64:]

    def connection_lost(self, exc: Exception | None) -> None:
        assert b"[DONE]" in self.tail, f"a stream was cut: {self.tail!r}"
        self.ended.set_result(None)


async def read_streams(url: str, number: int, num_tokens: int) -> list[Stream]:
    """Read so many streams that begin at once."""
    address, loop = urlsplit(url), asyncio.get_running_loop()
    body = {"prompt": [1, 2, 3], "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    request = head + content
    streams = [Stream(request, loop.create_future()) for _ in range(number)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, address.hostname, address.port)  # type: ignore[misc]
    await asyncio.gather(*(stream.ended for stream in streams))
    return streams


def run(server: ServerProcess, number: int, num_tokens: int) -> Cost:
    """Return what so many streams of so many tokens cost the processes of the server."""
    pid = server.process.pid
    others = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    own_ns, others_ns, began_ns = cpu_ns(pid), sum(map(cpu_ns, others)), monotonic_ns()
    asyncio.run(read_streams(server.url, number, num_tokens))
    took_ns, total = monotonic_ns() - began_ns, number * num_tokens
    return Cost(
        (cpu_ns(pid) - own_ns) / total / 1e3,
        (sum(map(cpu_ns, others)) - others_ns) / total / 1e3,
        total / took_ns * 1e9,
    )


def cpu_ns(pid: int | str) -> int:
    """Return the CPU time of all threads of a process."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def light(server: ServerProcess, num_tokens: int) -> tuple[list[float], list[float]]:
    """Return the times to the first token, of requests one after the other, and between tokens, of four streams."""
    first: list[float] = []
    for _ in range(50):
        (stream,) = asyncio.run(read_streams(server.url, 1, 2))
        first.append((stream.read_ns[0] - stream.begun_ns) / 1e9)
    streams = asyncio.run(read_streams(server.url, 4, num_tokens))
    gaps = [
        (later - earlier) / 1e9
        for stream in streams
        for earlier, later in zip(stream.read_ns, stream.read_ns[1:], strict=False)
    ]
    return first, gaps


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    main()
