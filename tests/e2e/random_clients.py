"""Clients that do what `turns` yields, and count the answers they get."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from urllib.parse import urlsplit

import httpx

from tests.e2e.random_turns import Action, turns

ANSWER_SECONDS = 300
SMALL_BUFFER_BYTES = 4096
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class UnexpectedAnswer(Exception):
    """An answer that the client did not expect."""


class Clients:
    """Clients that send good and bad requests, read slowly, and leave at any moment, and what they got."""

    def __init__(self, url: str, seed: int) -> None:
        split = urlsplit(url)
        self._address = (split.hostname, split.port)
        self._seed = seed
        # The client closes an idle connection before the server does.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2)
        self._http = httpx.AsyncClient(base_url=url, timeout=ANSWER_SECONDS, limits=limits, trust_env=False)
        self.num_sent = 0  # requests that reached a generation route
        self.problems: list[str] = []

    async def run(self, number: int, seconds: float) -> None:
        """Run so many clients for that long. Then each one finishes its turn."""
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
        try:
            await (self._ask(action) if action.reads_whole_answer else self._leave(action))
        except (httpx.HTTPError, OSError, UnexpectedAnswer, KeyError, ValueError) as error:
            self.problems.append(f"{action.kind}: {type(error).__name__} {error} {action.body[:200]!r}")

    async def _ask(self, action: Action) -> None:
        headers = {"content-type": "application/json"}
        response = await self._http.request(action.method, action.path, content=action.body, headers=headers)
        # A connection that is refused before its request is read gets an answer, too, but without an id.
        self.num_sent += action.reaches_a_generation_route and "x-request-id" in response.headers
        if response.status_code not in action.statuses:
            raise UnexpectedAnswer(f"answered with {response.status_code} {response.text[:200]}")
        if response.status_code == 200:
            check_answer(response, action.num_answers)

    async def _leave(self, action: Action) -> None:
        """Send the request on a raw connection and leave. The client waits for a 100 first, so that the request has
        reached its route for sure."""
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        if action.by_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        with sock:
            await loop.sock_connect(sock, self._address)
            head = f"POST {action.path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(action.body)}\r\n"
            head += "content-type: application/json\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n"
            await loop.sock_sendall(sock, head.encode())
            received = b""
            while len(received) < len(CONTINUE) and (more := await loop.sock_recv(sock, len(CONTINUE))):
                received += more
            if received != CONTINUE:
                raise UnexpectedAnswer(f"got {received[:200]!r} instead of a 100")
            self.num_sent += 1
            await loop.sock_sendall(sock, action.body[: action.body_bytes])
            if action.leave_after_seconds is not None:
                await asyncio.sleep(action.leave_after_seconds)
            elif action.leave_after_events is not None:
                num_events = 0
                while num_events <= action.leave_after_events and (more := await loop.sock_recv(sock, 4096)):
                    num_events += more.count(b"data: ")


def check_answer(response: httpx.Response, num_answers: int) -> None:
    """Raise UnexpectedAnswer unless every choice came to its end."""
    if response.headers["content-type"] == "application/json":
        choices = response.json()["choices"]
    else:
        *chunks, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        if done != "[DONE]":
            raise UnexpectedAnswer(f"the stream ended with {done[:200]}")
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    if sorted(ended) != list(range(num_answers)):
        raise UnexpectedAnswer(f"of {num_answers} choices these ended: {sorted(ended)}")
