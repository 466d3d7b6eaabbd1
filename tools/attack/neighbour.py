"""The well-behaved client during an attack: one stream that always decodes, and a prober that sends a small request
each second and asks /health.

It is a process of its own, `python -m tools.attack.neighbour URL`, so that the work of the attackers does not delay its
clock. It prints a line for each event, with times of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from tools.attack.attack import COMPLETIONS, NEIGHBOUR_ADDRESS, NEIGHBOUR_KEY
from tools.server_process import ROOT

STREAM_TOKENS = 400  # in one stream; the next begins at once
PROBE_SECONDS = 30.0  # the longest wait for an answer
STREAM_STALL_SECONDS = 120.0
RETRY_SECONDS = 0.5


@dataclass(frozen=True)
class Event:
    """One line of the neighbour. Kinds: `asked`, `token` and `ended` of the stream, `probe` (the time to the first
    token of a small request) and `health`. `seconds` is how long it took, `outcome` a status or an error's name."""

    kind: str
    at: float
    seconds: float = 0.0
    outcome: str = "200"


class Neighbour:
    """The running neighbour, as its lines tell."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.events: list[Event] = []
        self._token = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def stop(self) -> None:
        self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.events.append(Event(**json.loads(line)))
            if self.events[-1].kind == "token":
                self._token.set()

    def wait_for_token(self, limit_seconds: float) -> bool:
        """Wait until a token comes that is not there yet. Return whether one came."""
        self._token.clear()
        return self._token.wait(limit_seconds)


@contextmanager
def running_neighbour(url: str) -> Iterator[Neighbour]:
    command = [sys.executable, "-m", "tools.attack.neighbour", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        neighbour = Neighbour(process)
        try:
            yield neighbour
        finally:
            neighbour.stop()


# -- the process ------------------------------------------------------------------------------------------------------


def tell(kind: str, seconds: float = 0.0, outcome: str = "200") -> None:
    """Print an event that took so long until now."""
    print(json.dumps(asdict(Event(kind, time.monotonic() - seconds, seconds, outcome))), flush=True)


async def stream(http: httpx.AsyncClient) -> None:
    """Stream for ever."""
    number = 0
    while True:
        number += 1
        body = {"prompt": f"Story {number}:", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        outcome = "cut"
        tell("asked")
        try:
            async with http.stream("POST", COMPLETIONS, json=body, timeout=STREAM_STALL_SECONDS) as answer:
                if answer.status_code != 200:
                    outcome = str(answer.status_code)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        outcome = "200" if outcome == "cut" else outcome
                    elif line.startswith('data: {"error"'):
                        outcome = "error in the stream"
                    elif line and outcome == "cut":
                        tell("token")
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        tell("ended", outcome=outcome)
        if outcome != "200":
            await asyncio.sleep(RETRY_SECONDS)


async def ask(http: httpx.AsyncClient, kind: str, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Ask, and tell when the first part of the answer has come."""
    started = time.monotonic()
    outcome = "cut"
    try:
        async with http.stream(method, path, json=body) as answer:
            outcome = str(answer.status_code)
            async for _ in answer.aiter_bytes():
                break
    except httpx.HTTPError as error:
        outcome = type(error).__name__
    tell(kind, time.monotonic() - started, outcome)


async def live(url: str) -> None:
    # Connections are not kept, because an idle one may be closed by the server in the moment in which it is used.
    transport = httpx.AsyncHTTPTransport(
        local_address=NEIGHBOUR_ADDRESS, limits=httpx.Limits(max_keepalive_connections=0)
    )
    headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
    question = {"prompt": "Hi", "max_tokens": 2, "stream": True}
    async with (
        httpx.AsyncClient(base_url=url, transport=transport, headers=headers, timeout=PROBE_SECONDS) as http,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(stream(http))
        while True:
            await asyncio.sleep(1)
            group.create_task(ask(http, "probe", "POST", COMPLETIONS, question))
            group.create_task(ask(http, "health", "GET", "/health"))


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1]))
