"""Sends bodies of very many names, and of padding, by every way in: python -m tools.attack.ways

Prints a row for each way: how long /health and the stream of another client wait at most meanwhile, how many bytes the
server's memory grows by, and by how many it has grown after the connections are closed. Other programs on the machine
make waits longer: run it on a quiet one. The exit code is 1 if a wait is longer than 2 s, or if more than 100 MiB stay.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from oaiserve.plugins.responses.socket_frames import VERSION
from tools.attack.attack import ATTACKER_KEY, COMPLETIONS, NEIGHBOUR_KEY
from tools.attack.server import Server, oaiserve
from tools.bench import process_usage
from tools.markdown import as_markdown
from tools.server_process import exit_on_sigterm

BODY_BYTES = 7 * 2**20
MOST_WAIT_SECONDS = 2.0
MOST_LEFT_MIB = 100.0
SETTLE_SECONDS = 3.0  # The server gives memory back one second after the last large body.
NUM_SENT = 4  # bodies of each kind by each way
TEXT = b"\x81"  # the first byte of a frame with a whole message
HEAD = ("way in", "sends", "/health waits, s", "stream waits, s", "grows by, MiB", "after the close, MiB")
ENDS = (b'"response.completed"', b'"response.incomplete"', b'"error"', b'"response.steer.failed"')
KINDS = {
    "many names": b",".join(b'"%x":1' % number for number in range(BODY_BYTES // 10)),
    "padding": b" " * BODY_BYTES + b'"x":1',
}


def with_fields(hostile: bytes, **fields: object) -> bytes:
    return b"{%b,%b" % (hostile, json.dumps(fields).encode()[1:])


def ask(server: Server, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
    headers = {"authorization": f"Bearer {ATTACKER_KEY}", "content-type": content_type}
    with closing(http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)) as connection:
        connection.request(method, path, body, headers)
        return connection.getresponse().read()


def handshake(host: str) -> bytes:
    """Return the request for a socket."""
    key = base64.b64encode(os.urandom(16)).decode()
    head = f"GET /v1/responses HTTP/1.1\r\nhost: {host}\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    head += f"sec-websocket-version: {VERSION}\r\nsec-websocket-key: {key}\r\nauthorization: Bearer {ATTACKER_KEY}\r\n"
    return f"{head}\r\n".encode()


def framed(message: bytes) -> bytes:
    """Return a message in one frame, whose mask changes nothing."""
    return TEXT + b"\xff" + struct.pack(">Q", len(message)) + bytes(4) + message


def open_socket(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    sock = socket.create_connection((address.hostname, address.port), timeout=120)
    sock.sendall(handshake(address.netloc))
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(1)
    return sock


def send(sock: socket.socket, message: bytes) -> None:
    sock.sendall(framed(message))


def until_end(sock: socket.socket, *marks: bytes) -> None:
    received = b""
    while not any(mark in received for mark in marks or ENDS) and (data := sock.recv(2**20)):
        received = (received + data)[-(2**16) :]


def by_socket(server: Server, hostile: bytes) -> list[socket.socket]:
    sock = open_socket(server)
    for _ in range(NUM_SENT):
        send(sock, with_fields(hostile, type="response.create", input="Hi", store=False, max_output_tokens=16))
        until_end(sock)
    return [sock]


def in_a_lane(server: Server, hostile: bytes) -> list[socket.socket]:
    sock = open_socket(server)
    send(sock, with_fields(b'"x":1', type="response.create", input="Tell me a long story", max_output_tokens=2000))
    until_end(sock, b'"response.output_text.delta"')
    for _ in range(NUM_SENT):
        send(sock, with_fields(hostile, type="response.create", input="Hi", max_output_tokens=16))
    sock.sendall(b"\x89\x80" + bytes(4))
    until_end(sock, b"\x8a\x00")
    return [sock]


def by_steering(server: Server, hostile: bytes) -> list[socket.socket]:
    sock = open_socket(server)
    for _ in range(NUM_SENT):
        send(sock, with_fields(hostile, type="response.steer", previous_response_id="resp_x", input="Hi"))
        until_end(sock)
    return [sock]


def by_http(path: str, **fields: object) -> Callable[[Server, bytes], list[socket.socket]]:
    def way(server: Server, hostile: bytes) -> list[socket.socket]:
        for _ in range(NUM_SENT):
            ask(server, "POST", path, with_fields(hostile, **fields))
        return []

    return way


def upload(server: Server, content: bytes, purpose: str) -> str:
    form = b'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%b\r\n' % purpose.encode()
    form += b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--B--\r\n' % content
    file_id: str = json.loads(ask(server, "POST", "/v1/files", form, "multipart/form-data; boundary=B"))["id"]
    return file_id


def in_a_batch(server: Server, hostile: bytes) -> list[socket.socket]:
    body = with_fields(hostile, messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
    lines = b"".join(
        b'{"custom_id":"%d","url":"/v1/chat/completions","body":%b}\n' % (number, body) for number in range(NUM_SENT)
    )
    begin = {"input_file_id": upload(server, lines, "batch"), "endpoint": "/v1/chat/completions"}
    batch = json.loads(ask(server, "POST", "/v1/batches", json.dumps({**begin, "completion_window": "24h"}).encode()))
    while json.loads(ask(server, "GET", f"/v1/batches/{batch['id']}"))["status"] not in ("completed", "failed"):
        time.sleep(0.5)
    return []


def in_a_file(server: Server, hostile: bytes) -> list[socket.socket]:
    part = {"type": "input_file", "file_id": upload(server, b"{%b}" % hostile, "user_data")}
    body = {"input": [{"role": "user", "content": [part]}], "store": False}
    for _ in range(NUM_SENT):
        ask(server, "POST", "/v1/responses", json.dumps(body).encode())
    return []


def in_a_result(server: Server, hostile: bytes) -> list[socket.socket]:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [{"role": "user", "content": "Hi"}, call, {"type": "function_call_output", "call_id": "c", "output": "OUT"}]
    body = json.dumps({"input": items, "store": False}).encode().replace(b'"OUT"', b"[{%b}]" % hostile)
    for _ in range(NUM_SENT):
        ask(server, "POST", "/v1/responses", body)
    return []


HI = [{"role": "user", "content": "Hi"}]
WAYS: dict[str, Callable[[Server, bytes], list[socket.socket]]] = {
    "completions": by_http(COMPLETIONS, prompt="Hi", max_tokens=8),
    "chat": by_http("/v1/chat/completions", messages=HI, max_tokens=8),
    "responses": by_http("/v1/responses", input="Hi", store=False, max_output_tokens=16),
    "messages": by_http("/v1/messages", messages=HI, max_tokens=8),
    "background": by_http("/v1/responses", input="Hi", background=True, max_output_tokens=16),
    "socket": by_socket,
    "lane of a socket": in_a_lane,
    "steer": by_steering,
    "batch": in_a_batch,
    "file": in_a_file,
    "result of a tool": in_a_result,
}


@dataclass
class Watch:
    """Clients with a key of their own: one asks /health, another streams. Each notes its longest wait."""

    server: Server
    health_seconds: float = 0.0
    stream_seconds: float = 0.0
    has_ended: bool = False
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Watch:
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._health, self._stream)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.has_ended = True
        for thread in self.threads:
            thread.join(60)

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.server.url).netloc, timeout=120)

    def _health(self) -> None:
        while not self.has_ended:
            began = time.monotonic()
            with closing(self._connect()) as connection:
                connection.request("GET", "/health", headers={"authorization": f"Bearer {NEIGHBOUR_KEY}"})
                connection.getresponse().read()
            self.health_seconds = max(self.health_seconds, time.monotonic() - began)
            time.sleep(0.02)

    def _stream(self) -> None:
        body = json.dumps({"prompt": "The sea", "max_tokens": 200, "stream": True, "ignore_eos": True})
        headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}", "content-type": "application/json"}
        while not self.has_ended:
            with closing(self._connect()) as connection:
                connection.request("POST", COMPLETIONS, body, headers)
                last = None
                for line in connection.getresponse():
                    if line.startswith(b"data:"):
                        now = time.monotonic()
                        self.stream_seconds = max(self.stream_seconds, now - (last or now))
                        last = now
                    if self.has_ended:
                        break


def row(server: Server, name: str, kind: str) -> tuple[str, str, float, float, float, float]:
    time.sleep(SETTLE_SECONDS)
    before = process_usage.rss_mib(server.pid)
    process_usage.reset_peak_rss(server.pid)
    with Watch(server) as watch:
        sockets = WAYS[name](server, KINDS[kind])
        held = process_usage.peak_rss_mib(server.pid) - before
        for sock in sockets:
            sock.close()
    time.sleep(SETTLE_SECONDS)
    left = process_usage.rss_mib(server.pid) - before
    return name, kind, watch.health_seconds, watch.stream_seconds, held, left


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only", action="append", choices=WAYS, help="a way in; repeatable")
    arguments = parser.parse_args(argv)
    exit_on_sigterm()
    rows = []
    with oaiserve("keys", arguments.model, []) as server:
        WAYS["chat"](server, b'"x":1')
        for name in arguments.only or WAYS:
            for kind in KINDS:
                rows.append(row(server, name, kind))
                print(rows[-1], file=sys.stderr, flush=True)
    shown = [
        (*each[:2], *(f"{seconds:.2f}" for seconds in each[2:4]), *(f"{mib:+.0f}" for mib in each[4:])) for each in rows
    ]
    print("\n".join(as_markdown([HEAD, *shown])))
    return int(any(max(each[2:4]) > MOST_WAIT_SECONDS or each[5] > MOST_LEFT_MIB for each in rows))


if __name__ == "__main__":
    sys.exit(main())
