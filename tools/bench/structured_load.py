"""Keeps a number of streams running on a server for a while, and keeps each answer with the times of its events.

Each stream sends its next request as soon as its answer has ended. When the time is over, the answers that have begun
are read to their ends, so that each has its whole text and the number of its tokens.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpcore
import httpx

from loadtest.sse import DONE, EventSplitter
from loadtest.transport import StampedBackend, StampedTransport
from tools.bench.structured_requests import Ask

RETRY_SECONDS = 0.5  # after a request that failed
LIMIT_SECONDS = 300.0  # of one request


@dataclass(slots=True)
class Answer:
    """What came back for a request. Times are of the monotonic clock."""

    ask: Ask
    sent_ns: int
    event_ns: list[int] = field(default_factory=list)  # of each event that has text
    text: str = ""
    num_tokens: int = 0  # as the server counts them
    finish_reason: str | None = None
    problem: str | None = None  # why there is no whole answer


@dataclass(frozen=True, slots=True)
class Run:
    """All answers of a load, with the time in which they are measured."""

    answers: list[Answer]
    begin_ns: int
    end_ns: int
    client_cores: float  # that this process used, on average


async def run_load(url: str, streams: Sequence[Iterator[Ask]], *, warm_up_seconds: float, seconds: float) -> Run:
    """Run the streams, and measure after the warm-up for so many seconds."""
    begin_ns = time.monotonic_ns() + int(warm_up_seconds * 1e9)
    end_ns = begin_ns + int(seconds * 1e9)
    answers: list[Answer] = []
    started, used = time.monotonic(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(_repeat(url, stream, end_ns, answers))
    cores = (time.process_time() - used) / (time.monotonic() - started)
    return Run(answers, begin_ns, end_ns, cores)


async def _repeat(url: str, stream: Iterator[Ask], end_ns: int, answers: list[Answer]) -> None:
    """Send one request of the stream after the other until the time is over, and at least one."""
    transport = StampedTransport(StampedBackend(time.monotonic_ns), None)
    headers = {"accept-encoding": "identity"}
    async with httpx.AsyncClient(base_url=url, transport=transport, headers=headers, timeout=None) as http:
        for ask in stream:
            answers.append(await _exchange(http, ask))
            if time.monotonic_ns() >= end_ns:
                return
            if answers[-1].problem:
                await asyncio.sleep(RETRY_SECONDS)


async def _exchange(http: httpx.AsyncClient, ask: Ask) -> Answer:
    answer, events = Answer(ask, time.monotonic_ns()), list[tuple[int, bytes]]()
    try:
        async with (
            asyncio.timeout(LIMIT_SECONDS),
            http.stream("POST", "/v1/chat/completions", json=ask.body) as response,
        ):
            if response.status_code != 200:
                answer.problem = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:200]}"
                return answer
            splitter = EventSplitter()
            async for part in response.aiter_raw():
                read_ns = response.extensions["network_stream"].read_ns
                events += [(read_ns, event) for event in splitter.feed(part)]
    except (httpcore.NetworkError, httpcore.ProtocolError, OSError, TimeoutError) as error:
        answer.problem = type(error).__name__
    else:
        _interpret(answer, events)
    return answer


def _interpret(answer: Answer, events: Sequence[tuple[int, bytes]]) -> None:
    """Fill in the answer. This is done when it has ended, so that reading is only that."""
    texts = []
    for read_ns, data in events:
        if data == DONE:
            answer.text = "".join(texts)
            return
        message = json.loads(data)
        if "error" in message:
            answer.problem = str(message["error"])[:200]
            return
        for choice in message["choices"]:
            if content := choice["delta"].get("content"):
                texts.append(content)
                answer.event_ns.append(read_ns)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if message.get("usage"):
            answer.num_tokens = message["usage"]["completion_tokens"]
    answer.problem = "the stream ended without [DONE]"
