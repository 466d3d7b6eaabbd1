"""Clients that send random requests, good and bad, read slowly, and leave at any moment, by a function of the seed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("a", "the", "fox", "sea", "hill", "old", "river", "sings", "under", "then", "why", "seven", "Once", "Question")
ANSWER_SECONDS = 300
SMALL_BUFFER_BYTES = 4096
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER: on, 0 seconds
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass(frozen=True)
class Leave:
    """How a client leaves before the end of its answer."""

    by_reset: bool  # resets the connection instead of closing it
    body_bytes: int | None = None  # of its body, it sends only so many
    seconds: float = 0.0  # reads nothing for so long
    num_events: int = 0  # then reads so many events


@dataclass(frozen=True)
class Action:
    """One request, with all random choices made. A full server may answer it with 429."""

    path: str
    body: bytes
    statuses: tuple[int, ...] = (200,)
    num_choices: int = 1  # over all prompts
    leave: Leave | None = None


HI = [{"role": "user", "content": "Hi"}]
BAD_ACTIONS = [
    Action(path, body if isinstance(body, bytes) else json.dumps(body).encode(), (400, 404))
    for path, body in (
        (COMPLETIONS, b'{"prompt": "Hi"'),
        (COMPLETIONS, {"prompt": 5}),
        (COMPLETIONS, {"prompt": [2**31 - 1]}),
        (COMPLETIONS, {"prompt": "one two three " * 4000}),
        (CHAT, {"messages": [{"role": "king", "content": "Hi"}]}),
        (CHAT, {"messages": HI, "model": "gpt-9", "stream": True}),
    )
]


def turns(seed: int, client: int) -> Iterator[tuple[float, list[Action]]]:
    """Yield what a client does: after a pause in seconds, some requests at once."""
    rng = random.Random(f"{seed}/{client}")
    yield rng.uniform(0, 2), BAD_ACTIONS if client == 0 else []  # clients start at different times
    while True:
        if rng.random() < 0.04:
            yield 0.0, [valid(rng) for _ in range(rng.randint(16, 32))]
        else:
            kinds = (valid, leaves, does_not_read, lambda rng: rng.choice(BAD_ACTIONS))
            (kind,) = rng.choices(kinds, (8, 5, 1, 3))
            yield rng.expovariate(5), [kind(rng)]


def valid(rng: random.Random) -> Action:
    is_chat, stream = rng.random() < 0.5, rng.random() < 0.5
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 2, 4, 8, 16, 32)), "n": rng.choices((1, 2, 3), (8, 1, 1))[0]}
    body |= rng.choice(({"temperature": 0}, {"temperature": 1.2, "top_p": 0.9}, {"seed": rng.randrange(1000)}, {}))
    extras: tuple[dict[str, Any], ...] = (
        {"stop": rng.sample([" the", "\n", "e", ". "], 2)},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"logit_bias": {str(rng.randrange(1000)): 5}},
        {"ignore_eos": True},
        {"logprobs": True, "top_logprobs": rng.randint(0, 20)} if is_chat else {"logprobs": rng.randint(0, 5)},
        {"stream_options": {"include_usage": True}} if stream else {},
    )
    for extra in extras:
        if rng.random() < 0.2:
            body |= extra
    prompts = [text(rng)] if is_chat else prompts_of(rng)
    body |= {"messages": [{"role": "user", "content": prompts[0]}]} if is_chat else {"prompt": prompts}
    content = json.dumps(body | {"stream": stream}).encode()
    return Action(CHAT if is_chat else COMPLETIONS, content, num_choices=body["n"] * len(prompts))


def prompts_of(rng: random.Random) -> list[Any]:
    """Make prompts of text or token ids. Some share a beginning, some are long."""
    num_prompts = rng.choices((1, 2), (6, 1))[0]
    if rng.random() < 0.3:
        return [[rng.randrange(100, 40_000) for _ in range(rng.randint(1, 300))] for _ in range(num_prompts)]
    return [text(rng) for _ in range(num_prompts)]


def text(rng: random.Random) -> str:
    prefix = "The same words at the start of many prompts, so that they can be shared. " * rng.choice((0, 0, 1, 4))
    return prefix + " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))


def leaves(rng: random.Random) -> Action:
    """Leave while the body is sent, at any moment, or within a stream."""
    action, by_reset = valid(rng), rng.random() < 0.5
    how = (
        Leave(by_reset, body_bytes=rng.randrange(len(action.body))),
        Leave(by_reset, seconds=rng.expovariate(3)),
        Leave(by_reset, num_events=1 + rng.randrange(16)),
    )
    return replace(action, leave=rng.choices(how, (1, 2, 2))[0])


def does_not_read(rng: random.Random) -> Action:
    """Ask for more than the buffers hold, so that the server has to wait. Some clients stay until they are cut off."""
    body = {"prompt": text(rng), "max_tokens": 120, "ignore_eos": True, "logprobs": 20, "stream": rng.random() < 0.7}
    return Action(COMPLETIONS, json.dumps(body).encode(), leave=Leave(rng.random() < 0.5, seconds=rng.uniform(2, 8)))


class UnexpectedAnswer(Exception):
    """An answer that the client did not expect."""


class Clients:
    """Random clients of a server, and what they got."""

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
        for pause_seconds, actions in turns(self._seed, client):
            await asyncio.sleep(min(pause_seconds, max(0.0, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                return
            await asyncio.gather(*map(self._do, actions))

    async def _do(self, action: Action) -> None:
        try:
            await (self._ask(action) if action.leave is None else self._leave(action, action.leave))
        except (httpx.HTTPError, OSError, UnexpectedAnswer, KeyError, ValueError) as error:
            self.problems.append(f"{type(error).__name__} {error} {action.leave} {action.body[:200]!r}")

    async def _ask(self, action: Action) -> None:
        headers = {"content-type": "application/json"}
        response = await self._http.post(action.path, content=action.body, headers=headers)
        # A connection that is refused before its request is read gets an answer, too, but without an id.
        self.num_sent += "x-request-id" in response.headers
        if response.status_code not in (*action.statuses, 429):
            raise UnexpectedAnswer(f"answered with {response.status_code} {response.text[:200]}")
        if response.status_code == 200:
            check_answer(response, action.num_choices)

    async def _leave(self, action: Action, leave: Leave) -> None:
        """Send the request on a raw connection and leave. The client waits for a 100 first, so that the request has
        reached its route for sure."""
        loop, sock = asyncio.get_running_loop(), socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
        if leave.by_reset:
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
            await loop.sock_sendall(sock, action.body[: leave.body_bytes])
            await asyncio.sleep(leave.seconds)
            num_events = 0
            while num_events < leave.num_events and (more := await loop.sock_recv(sock, 4096)):
                num_events += more.count(b"data: ")


def check_answer(response: httpx.Response, num_choices: int) -> None:
    """Raise UnexpectedAnswer unless every choice came to its end."""
    if response.headers["content-type"] == "application/json":
        choices = response.json()["choices"]
    else:
        *chunks, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        if done != "[DONE]":
            raise UnexpectedAnswer(f"the stream ended with {done[:200]}")
        choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    ended = [choice["index"] for choice in choices if choice["finish_reason"] is not None]
    if sorted(ended) != list(range(num_choices)):
        raise UnexpectedAnswer(f"of {num_choices} choices these ended: {sorted(ended)}")
