"""Measures what a WebSocket saves an agent: python -m tools.bench.sockets

An agent takes 20 turns, each with a new result of about 700 bytes, on a connection that stays open: with its whole
conversation in each request, with the id of the response before, and on a socket. Every turn has the instructions and
the tools. Runs alternate, and each begins with text that no cache has. The bytes are those of requests with the headers
of OpenAI's SDK, or of frames. The table has medians over the runs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

from oaiserve.checkpoints import demo
from tools.bench.servers import ServerSpec, oaiserve
from tools.markdown import add_publishing, as_markdown, number, publish, results_of
from tools.server_process import exit_on_sigterm

PATH = "/v1/responses"
TURNS = 20
WAYS = ("whole conversation", "previous response", "socket")
WORDS = ("sea", "light", "keeper", "storm", "harbour", "engine", "rope", "glass", "winter", "signal", "island", "lamp")
HEADERS = (
    "accept: application/json",
    "accept-encoding: gzip, deflate",
    "connection: keep-alive",
    "user-agent: OpenAI/Python 3.57.0",
    "content-type: application/json",
    "authorization: Bearer none",
    *(f"x-stainless-{name}: {value}" for name, value in (
        ("lang", "python"), ("package-version", "3.57.0"), ("os", "Linux"), ("arch", "x64"), ("runtime", "CPython"),
        ("runtime-version", "3.11.7"), ("async", "false"), ("retry-count", "0"), ("read-timeout", "600"),
    )),
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"Runs the command {name} on the paths that match, and returns what it has printed.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "description": "The path, from the root of the project."},
                "limit": {"type": "integer", "description": "The most lines to return."},
            },
            "required": ["path"],
        },
    }
    for name in ("read", "write", "list", "search", "run", "diff")
]


@dataclass
class Agent:
    """A connection on which an agent takes turns, in one of the WAYS."""

    url: str
    way: str
    items: list[dict[str, Any]] = field(default_factory=list)
    previous: str | None = None
    num_bytes: int = 0  # sent so far

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        self._host = address.netloc
        self._sock = socket.create_connection((address.hostname, address.port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file: BinaryIO = self._sock.makefile("rb")
        if self.way == "socket":
            key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13"
            self._send(
                self._head("GET", "connection: Upgrade", "upgrade: websocket", *key, "authorization: Bearer none")
            )
            assert b" 101 " in self._file.readline()
            while self._file.readline() != b"\r\n":
                pass

    def turn(self, text: str, instructions: str) -> tuple[float, int]:
        """Take a turn, and return the seconds until its first token and the number of tokens in its prompt."""
        item = {"role": "user", "content": text}
        self.items.append(item)
        body: dict[str, Any] = {
            "model": demo.NAME,
            "instructions": instructions,
            "tools": TOOLS,
            "tool_choice": "none",
            "temperature": 0,
            "max_output_tokens": 16,
            "input": self.items if self.way == WAYS[0] else [item],
        }
        if self.way == WAYS[0]:
            body["store"] = False
        elif self.previous is not None:
            body["previous_response_id"] = self.previous
        began = time.perf_counter()
        if self.way == "socket":
            self._send(_frame(json.dumps({"type": "response.create", **body}).encode()))
        else:
            data = json.dumps({**body, "stream": True}).encode()
            self._send(self._head("POST", *HEADERS, f"content-length: {len(data)}") + data)
        first = 0.0
        for event in self._events():
            if event["type"] == "response.output_text.delta" and not first:
                first = time.perf_counter() - began
            if event["type"] in ("response.completed", "response.incomplete"):
                break
            assert event["type"] not in ("error", "response.failed"), event
        response = event["response"]
        self.previous = response["id"]
        self.items += response["output"]
        return first, response["usage"]["input_tokens"]

    def close(self) -> None:
        self._file.close()
        self._sock.close()

    def _head(self, method: str, *lines: str) -> bytes:
        return "\r\n".join([f"{method} {PATH} HTTP/1.1", f"host: {self._host}", *lines, "", ""]).encode()

    def _send(self, data: bytes) -> None:
        self._sock.sendall(data)
        self.num_bytes += len(data)

    def _events(self) -> Iterator[dict[str, Any]]:
        if self.way == "socket":
            while True:
                opcode, length = self._file.read(2)
                if length > 125:
                    length = int.from_bytes(self._file.read(2 if length == 126 else 8), "big")
                data = self._file.read(length)
                if opcode == 0x81:
                    yield json.loads(data)
        status = self._file.readline()
        assert b" 200 " in status, status
        while self._file.readline() != b"\r\n":
            pass
        text = b""
        while size := int(self._file.readline(), 16):
            text += self._file.read(size)
            self._file.readline()
            *blocks, text = text.split(b"\n\n")
            for block in blocks:
                if block.startswith(b"event: ") and (event := json.loads(block.partition(b"\ndata: ")[2])):
                    if event["type"] in ("response.completed", "response.incomplete"):
                        self._read_end()
                        yield event
                        return
                    yield event

    def _read_end(self) -> None:
        """Read the rest of an answer, which has no more events."""
        while size := int(self._file.readline(), 16):
            self._file.read(size + 2)
        self._file.readline()


def _frame(data: bytes) -> bytes:
    mask = os.urandom(4)
    size = len(data)
    length = bytes((0x80 | 126,)) + size.to_bytes(2, "big")
    if size < 126:
        length = bytes((0x80 | size,))
    elif size >= 2**16:
        length = bytes((0x80 | 127,)) + size.to_bytes(8, "big")
    mixed = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
    return b"\x81" + length + mask + mixed


def measured(server: ServerSpec, repeats: int) -> list[dict[str, Any]]:
    """Return the bytes of each run, and the time to the first token of each of its turns."""
    runs: list[dict[str, Any]] = []
    with server.running(PATH, {"input": "Hi", "max_output_tokens": 1}) as process:
        for number_of_run in range(repeats):
            for way in random.sample(WAYS, len(WAYS)):
                texts = random.Random(f"{number_of_run} {way}")
                instructions = " ".join(texts.choices(WORDS, k=600))
                agent = Agent(process.url, way)
                turns = [agent.turn(" ".join(texts.choices(WORDS, k=110)), instructions) for _ in range(TURNS)]
                agent.close()
                seconds = [first for first, _ in turns]
                runs.append({"way": way, "bytes": agent.num_bytes, "ttft": seconds, "tokens": turns[-1][1]})
    return runs


def report(results: dict[str, Any]) -> str:
    rows = [["20 turns", "bytes sent", "TTFT p50, ms", "TTFT of the last five turns, ms", "all TTFT, s"]]
    for way in WAYS:
        runs = [run for run in results["runs"] if run["way"] == way]
        figures = (
            [run["bytes"] for run in runs],
            [1000 * statistics.median(run["ttft"][1:]) for run in runs],
            [1000 * statistics.mean(run["ttft"][-5:]) for run in runs],
            [sum(run["ttft"]) for run in runs],
        )
        rows.append([way, *(_spread(each) for each in figures)])
    tokens = max(run["tokens"] for run in results["runs"])
    about = f"{results['machine']} {results['created']}. The last prompt of a run has {tokens:,} tokens."
    return "\n".join([textwrap.fill(about, 120), "", *as_markdown(rows)])


def _spread(values: list[float]) -> str:
    middle = statistics.median(values)
    return f"{number(middle)} ({number(min(values))}..{number(max(values))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (default 3)")
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file (default: the demo model)")
    add_publishing(parser, "sockets")
    arguments = parser.parse_args()
    exit_on_sigterm()
    results = results_of(arguments, lambda asked: {"runs": measured(oaiserve(asked.model), asked.repeats)})
    publish(arguments, "sockets", results, report(results))


if __name__ == "__main__":
    main()
