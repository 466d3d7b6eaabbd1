"""Clients: what they ask, how they behave, and what their answers must be. Those that leave early got a begin of it."""

import asyncio
import json
import re
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import httptools

from oaiserve.engine.sequences.noise import draw_key
from tests.answers import TIMES, by_choice, shown
from tests.world.fleet import GATEWAY_IP, PORT
from tests.world.loop import UNIX_SECONDS, Process, World
from tests.world.model import NUM_KEYS

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
PATIENCE_SECONDS = 300.0
MOST_SILENT_SECONDS = 45.0  # where one server is well: two others may be silent, one after the other
LONG = "The quick brown fox jumps over the lazy dog, and again: " * 2
ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}
SEEDS = [next(s for s in count() if draw_key(s, 0) % NUM_KEYS == key) for key in range(NUM_KEYS)]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "Hello", "max_tokens": 60, "seed": 1, "stream": True}),
    "long": (COMPLETIONS, {"prompt": LONG + "a", "max_tokens": 50, "seed": 2, "stream": True}),
    "usage": (COMPLETIONS, {"prompt": LONG + "b", "max_tokens": 40, "stream": True, "stream_options": ALL_USAGE}),
    "ids": (COMPLETIONS, {"prompt": "Hello you", "max_tokens": 50, "return_token_ids": True, "stream": True}),
    "choices": (COMPLETIONS, {"prompt": LONG + "c", "n": 2, "max_tokens": 30, "seed": 5, "echo": True, "stream": True}),
    "chunks": (
        COMPLETIONS,
        {"prompt": "Hi", "max_tokens": 60, "seed": 4, "stream_interval": 3, "stop": ["q"], "stream": True},
    ),
    "chat": (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}),
    "response": (RESPONSES, {"input": LONG, "max_output_tokens": 40, "seed": 7, "stream": True}),
    "short": (RESPONSES, {"input": "Hi", "max_output_tokens": 2, "seed": 11, "stream": True}),
    "short whole": (RESPONSES, {"input": "Hi", "max_output_tokens": 2, "seed": 12}),
    "unstored": (RESPONSES, {"input": "Hi", "max_output_tokens": 30, "store": False, "seed": 8, "stream": True}),
    "whole": (COMPLETIONS, {"prompt": LONG + "d", "max_tokens": 40, "seed": 9}),
    "whole chat": (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 30, "seed": 10}),
}
_cached = re.compile(rb'"(cached|cache_write)_tokens":\d+')
_signs_of_life = re.compile(rb"^: (\d+ of \d+ prompt tokens|the answer is about to go on)\n\n", re.MULTILINE)
# Events without news, which a stream gets after a silence of ten seconds.
_activity = re.compile(rb'"delta":""|"delta":\{\}.*"finish_reason":null|"text":"".*"finish_reason":null')
_number = re.compile(rb'(?<="sequence_number":)\d+')
_leaks = re.compile(rb"10\.0\.\d+\.\d+|^: ", re.MULTILINE)
_hidden = (b"x-oaiserve-kind", b"x-oaiserve-sent", b"x-oaiserve-stream")


@dataclass
class Answer:
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_complete: bool = False
    asked_seconds: float = 0.0
    silent_seconds: float = 0.0  # the longest time without any bytes but signs of life

    @property
    def is_stream(self) -> bool:
        return (b"content-type", b"text/event-stream; charset=utf-8") in self.headers or b"\ndata: " in self.body[:99]


class Client(asyncio.Protocol):
    """One request on one connection."""

    def __init__(self) -> None:
        self.answer = Answer()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._heard = asyncio.get_running_loop().time()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        now = asyncio.get_running_loop().time()
        if not _signs_of_life.search(data):
            self.answer.silent_seconds = max(self.answer.silent_seconds, now - self._heard)
            self._heard = now
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        self.answer.is_complete = True
        self.connection_lost(None)


async def ask(
    case: str, ip: str = GATEWAY_IP, leaves: float = 0.0, dozes: float = 0.0, query: str = "", **more: Any
) -> Answer:
    """Ask a server, and return the answer. With `leaves`, go after these seconds; with `dozes`, don't read for
    these. Raises OSError, and TimeoutError if there is no end."""
    world: Any = asyncio.get_running_loop()
    path, body = CASES[case]
    content = json.dumps(body | more).encode()
    lines = [f"POST {path}{query} HTTP/1.1", f"host: {ip}", "content-type: application/json"]
    lines.append(f"content-length: {len(content)}")
    lines += ["x-oaiserve-stream: " + "ab" * 16 + " 5 7", "x-forwarded-for: 6.6.6.6", "", ""]  # what it must not choose
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, client = await world.create_connection(Client, ip, PORT)
        client.answer.asked_seconds = UNIX_SECONDS + world.now
        client.transport.write("\r\n".join(lines).encode() + content)
        try:
            if dozes:
                await asyncio.sleep(0.3)
                client.transport.pause_reading()
                await asyncio.sleep(dozes)
                client.transport.resume_reading()
            if leaves:
                await asyncio.wait([client.done], timeout=leaves)
            else:
                await client.done
        finally:
            client.transport.abort() if leaves else client.transport.close()
    return client.answer


def _shown(content: bytes) -> bytes:
    return _cached.sub(rb'"\1_tokens":0', shown(content))


def _events(content: bytes) -> dict[int, list[bytes]]:
    """Return the events of a stream that bring news, by choice. They are numbered as if there were no others; where a
    number is wrong, it stays so."""
    kept: list[bytes] = []
    num_numbered = 0
    num_kept = 0
    has_begun = False
    for event in content.split(b"\n\n"):
        begins = event.startswith(b"event: response.in_progress")
        is_news = not _activity.search(event) and not (begins and has_begun)
        has_begun |= begins
        if number := _number.search(event):
            if int(number[0]) == num_numbered:
                event = _number.sub(b"%d" % num_kept, event, count=1)
            num_numbered += 1
            num_kept += is_news
        if is_news:
            kept.append(event)
    return by_choice(b"\n\n".join(kept))


class Judge:
    """Knows the answers of an undisturbed server, and compares."""

    def __init__(self, references: dict[str, list[Answer]]) -> None:
        self._references = {
            case: [_events(_shown(one.body)) if one.is_stream else _shown(one.body) for one in answers]
            for case, answers in references.items()
        }

    def fault_of(self, case: str, answer: Answer, *, has_left: bool, may_break: bool) -> str:
        """Return the faults of an answer."""
        answer = replace(answer, body=_signs_of_life.sub(b"", answer.body))
        what = f"{case}: {answer.status}, {len(answer.body)} bytes"
        if any(name in _hidden for name, _ in answer.headers) or _leaks.search(answer.body):
            return f"{what}: it shows what is between gateway and server: {answer.body[-300:]!r} {answer.headers}"
        if has_left and not answer.status:
            return ""
        if answer.status != 200:
            is_error = answer.is_complete and answer.body.startswith(b'{"error":')
            if answer.status not in (429, 503) or not is_error:
                return "" if has_left else f"{what} is no proper error: {answer.body[:300]!r}"
            return "" if may_break else f"{what}: an error without need: {answer.body[:300]!r}"
        for created in TIMES.findall(answer.body):
            if not -1 <= int(created[1]) - answer.asked_seconds <= 100:
                return f"{what}: it was created at {created[1]!r}, and asked for at {answer.asked_seconds}"
        if b"ab" * 16 in answer.body:
            return f"{what}: its client has chosen the id"
        body = _shown(answer.body)
        references = self._references[case]
        if not answer.is_stream:
            if not answer.is_complete or body in references:
                return ""  # no status can say it any more that its server has ended
            return f"{what}: it differs from an undisturbed one: {body!r}"
        if answer.silent_seconds > MOST_SILENT_SECONDS and not may_break:
            return f"{what}: it paused for {answer.silent_seconds:.1f} s"
        events = _events(body)
        if answer.is_complete and not has_left and events in references:
            return ""
        rest = events.get(-1, [])
        errors = [number for number, event in enumerate(rest) if b'"error":{' in event or b"response.failed" in event]
        is_ended = answer.is_complete and errors and body.endswith(b"data: [DONE]\n\n")
        if errors:
            del rest[errors[0] :]
        if not any(_begins(events, reference) for reference in references):
            return f"{what}: it differs from an undisturbed one: {body!r}"
        if not is_ended and not has_left:
            return f"{what}: it has no end: {body[-300:]!r}"
        return "" if has_left or may_break else f"{what}: it was broken without need: {answer.body[-400:]!r}"


def _begins(events: dict[int, list[bytes]], whole: Any) -> bool:
    return all(each == whole.get(choice, [])[: len(each)] for choice, each in events.items())


async def references(world: World, ip: str) -> dict[str, list[Answer]]:
    """Return the answers of an undisturbed server: several of requests without a seed."""
    answers: dict[str, list[Answer]] = {}
    for case, (_, body) in CASES.items():
        seeds = [{}] if "seed" in body else [{"seed": seed} for seed in SEEDS]
        answers[case] = [await ask(case, ip, **seed) for seed in seeds]
        assert all(answer.status == 200 and answer.is_complete for answer in answers[case]), (answers, world.wrong)
    return answers


def process_of(world: World, number: int) -> Process:
    return Process(world, f"client {number}", f"10.1.{number // 250 % 250}.{number % 250}")
