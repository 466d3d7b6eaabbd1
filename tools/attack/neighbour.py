"""The well-behaved client beside an attack: one stream that always decodes, and a prober that sends a small request
each second and asks /health.

It is a process of its own, `python -m tools.attack.neighbour URL SECONDS`, so that the work of the attackers does not
delay its clock. It prints a line for each event, with times of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from loadtest.sse import DONE, EventSplitter
from tools.attack.attack import NEIGHBOUR_ADDRESS, NEIGHBOUR_KEY
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


@dataclass(frozen=True)
class Gap:
    """The time between two tokens of the stream."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def gaps(events: Sequence[Event], until: float) -> list[Gap]:
    """Return the gaps of the streams. One that is open ends at `until`, so that a stall counts before it is over."""
    found, last = [], None
    for event in events:
        if event.kind == "token":
            if last is not None:
                found.append(Gap(last, event.at))
            last = event.at
        elif event.kind in ("asked", "ended"):
            if event.outcome != "200" and last is not None:
                found.append(Gap(last, event.at))
            last = None
    if last is not None:
        found.append(Gap(last, until))
    return found


def within(gaps: Sequence[Gap], start: float, end: float) -> list[float]:
    """Return the seconds of the gaps that lie in this window, or at least reach into it."""
    return [gap.seconds for gap in gaps if gap.end > start and gap.start < end]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of them."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


class Neighbour:
    """The running neighbour, as its lines tell."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._events: list[Event] = []
        self._first_token = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def stop(self) -> None:
        self._process.kill()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = Event(**json.loads(line))
            self._events.append(event)
            if event.kind == "token":
                self._first_token.set()

    @property
    def events(self) -> list[Event]:
        return list(self._events)

    def wait_for_token(self, limit_seconds: float) -> bool:
        """Wait until a token comes that is not there yet. Return whether one came."""
        self._first_token.clear()
        return self._first_token.wait(limit_seconds)


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


def tell(kind: str, at: float, seconds: float = 0.0, outcome: str = "200") -> None:
    print(json.dumps({"kind": kind, "at": at, "seconds": seconds, "outcome": outcome}), flush=True)


async def stream(http: httpx.AsyncClient) -> None:
    """Stream for ever."""
    number = 0
    while True:
        number += 1
        body = {"prompt": f"Story {number}:", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        outcome = "cut"
        tell("asked", time.monotonic())
        try:
            async with http.stream("POST", "/v1/completions", json=body, timeout=STREAM_STALL_SECONDS) as answer:
                if answer.status_code != 200:
                    outcome = str(answer.status_code)
                else:
                    splitter = EventSplitter()
                    async for part in answer.aiter_bytes():
                        for data in splitter.feed(part):
                            if data == DONE:
                                outcome = "200" if outcome == "cut" else outcome
                            elif b'"error"' in data[:12]:
                                outcome = "error in the stream"
                            else:
                                tell("token", time.monotonic())
        except httpx.HTTPError as error:
            outcome = type(error).__name__
        tell("ended", time.monotonic(), outcome=outcome)
        if outcome != "200":
            await asyncio.sleep(RETRY_SECONDS)


async def probe(http: httpx.AsyncClient) -> None:
    started, outcome = time.monotonic(), "cut"
    body = {"prompt": "Hi", "max_tokens": 2, "stream": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            outcome = str(answer.status_code)
            async for _ in answer.aiter_bytes():
                break
    except httpx.HTTPError as error:
        outcome = type(error).__name__
    tell("probe", started, time.monotonic() - started, outcome)


async def ask_health(http: httpx.AsyncClient) -> None:
    started = time.monotonic()
    try:
        outcome = str((await http.get("/health")).status_code)
    except httpx.HTTPError as error:
        outcome = type(error).__name__
    tell("health", started, time.monotonic() - started, outcome)


async def live(url: str) -> None:
    # Connections are not kept, because an idle one may be closed by the server in the moment in which it is used.
    transport = httpx.AsyncHTTPTransport(
        local_address=NEIGHBOUR_ADDRESS, verify=False, limits=httpx.Limits(max_keepalive_connections=0)
    )
    headers = {"authorization": f"Bearer {NEIGHBOUR_KEY}"}
    async with (
        httpx.AsyncClient(base_url=url, transport=transport, headers=headers, timeout=PROBE_SECONDS) as http,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(stream(http))
        while True:
            await asyncio.sleep(1)
            group.create_task(probe(http))
            group.create_task(ask_health(http))


if __name__ == "__main__":
    asyncio.run(live(sys.argv[1]))
