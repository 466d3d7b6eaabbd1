"""Reads the facts in an answer while its bytes are passed to the client. It never changes them.

Engines use several forms, some of them invalid. An answer that can't be read is `unread`: its account has only its
times and its status.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.plugins.gateway.sources import UNREADABLE

MOST_EVENT_BYTES = 2**20  # limit of an event of a stream, and of a whole answer
MOST_TOGETHER = 32  # parts that are read at once
LARGE_PART_BYTES = 4096  # size from which a part is read before others come
EVENT_STREAM = b"text/event-stream"
LINES = b"application/x-ndjson"  # Ollama's streams: an object on each line
JSON = b"application/json"
_MOST_CHOICES = 128  # choices whose end is noted
_TEXTS = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls", "function_call", "refusal", "audio")
# The usage has these numbers at other places in each of OpenAI's two APIs, and in SGLang.
_CACHED = ("prompt_tokens_details.cached_tokens", "input_tokens_details.cached_tokens", "cached_tokens")
_REASONING = (
    "completion_tokens_details.reasoning_tokens",
    "output_tokens_details.reasoning_tokens",
    "reasoning_tokens",
)
# Times by the engine's own clock: the fact, where an answer has it, and the nanoseconds of its unit. Those of vLLM need
# --enable-per-request-metrics. Ollama's are in the last object of its answer.
_TIMES = (
    ("queue_ns", ("metrics", "queue_time_ms"), 1e6),
    ("prompt_ns", ("metrics", "time_to_first_token_ms"), 1e6),
    ("generate_ns", ("metrics", "generation_time_ms"), 1e6),
    ("prompt_ns", ("timings", "prompt_ms"), 1e6),
    ("generate_ns", ("timings", "predicted_ms"), 1e6),
    ("load_ns", ("load_duration",), 1),
    ("prompt_ns", ("prompt_eval_duration",), 1),
    ("generate_ns", ("eval_duration",), 1),
)


class Event(msgspec.Struct):
    """The fields that are read, of a whole answer or an event of a stream, in the APIs of OpenAI and Anthropic and in
    the engines' own ones. Engines may put any values there."""

    id: Any = None
    type: Any = None
    choices: Any = None
    usage: Any = None
    timings: Any = None  # llama.cpp
    metrics: Any = None  # vLLM
    meta_info: Any = None  # SGLang's own API
    text: Any = None  # likewise
    content: Any = None  # llama.cpp's own API
    error: Any = None
    response: Any = None  # the object of OpenAI's Responses API, or a text of Ollama's
    message: Any = None  # Anthropic's and Ollama's
    thinking: Any = None  # Ollama
    delta: Any = None
    done: Any = None
    done_reason: Any = None
    prompt_eval_count: Any = None
    prompt_eval_cached_count: Any = None
    eval_count: Any = None
    load_duration: Any = None
    prompt_eval_duration: Any = None
    eval_duration: Any = None


# A stream's event that has anything besides text, or an empty text, contains one of these.
_NOTED = (
    *(b'usage":{', b'usage": {', b'"timings"', b'"error"', b'_reason":"', b'_reason": "', b'"prompt_progress"'),
    *(b'"meta_info"', b'":""', b'": ""', b"{}"),
)
_event = msgspec.json.Decoder(Event)


class Told:
    """The facts in an answer so far."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.reasoning_tokens: int | None = None
        self.finish_reasons: dict[int, str] = {}
        self.error: str | None = None  # the engine's error, for example in a stream whose status was 200
        # Times by the engine's own clock: in its queue, to load its model, to compute the prompt, and to generate.
        self.queue_ns: int | None = None
        self.load_ns: int | None = None
        self.prompt_ns: int | None = None
        self.generate_ns: int | None = None
        self.first_text_ns: int | None = None  # when the first event with text came
        self.last_text_ns: int | None = None
        self.gaps_ns = array("q")  # between two events with text

    def texts_came(self, times_ns: Sequence[int]) -> None:
        """Note the times of events with text, one or more."""
        if self.last_text_ns is None:
            self.first_text_ns = self.last_text_ns = times_ns[0]
            times_ns = times_ns[1:]
        for time_ns in times_ns:
            self.gaps_ns.append(time_ns - self.last_text_ns)
            self.last_text_ns = time_ns

    def read(self, event: Event, now_ns: int) -> None:
        """Note what an object says."""
        if event.error and self.error is None:
            text = at(event.error, "message") if isinstance(event.error, Mapping) else event.error
            self.error = str(text)[:200]
        whole = event.response if isinstance(event.response, Mapping) else event.message
        whole = whole if isinstance(whole, Mapping) else {}
        for one in (event.id, whole.get("id")):
            if self.response_id is None and isinstance(one, str) and len(one) <= 128:
                self.response_id = one
        has_text = False
        for choice in event.choices if isinstance(event.choices, list) else ():
            has_text |= self._read_choice(choice)
        kind = event.type if isinstance(event.type, str) else ""
        if kind == "content_block_delta" or (kind.startswith("response.") and kind.endswith(".delta")):
            has_text = True
        elif kind == "message_delta" and isinstance(reason := at(event.delta, "stop_reason"), str):
            self.finish_reasons[0] = reason[:32]
        elif not kind:  # An object of an engine's own API has no type.
            texts = (event.response, event.thinking, event.content, event.text)
            has_text |= any(isinstance(text, str) and text for text in texts)
            has_text |= event.done is not None and any(whole.get(name) for name in _TEXTS)
        for reason in (event.done_reason, at(event.meta_info, "finish_reason", "type")):
            if isinstance(reason, str):
                self.finish_reasons[0] = reason[:32]
        if has_text:
            self.texts_came([now_ns])
        for usage in (event.usage, whole.get("usage"), event.meta_info):
            if isinstance(usage, Mapping):
                self._read_usage(usage)
        if event.done is not False:
            self._read_numbers(event)

    def _read_choice(self, choice: Any) -> bool:
        """Note the end of a choice, and return whether the event has text of it."""
        if not isinstance(choice, Mapping):
            return False
        index = choice.get("index")
        reason = choice.get("finish_reason")
        if isinstance(reason, str) and type(index) is int and len(self.finish_reasons) < _MOST_CHOICES:
            self.finish_reasons[index] = reason[:32]
        delta = choice.get("delta")
        return bool(choice.get("text")) or (isinstance(delta, Mapping) and any(delta.get(name) for name in _TEXTS))

    def _read_usage(self, usage: Mapping[str, Any]) -> None:
        prompt = _count(usage, "prompt_tokens", "input_tokens")
        cached = _count(usage, *_CACHED)
        if (read := _count(usage, "cache_read_input_tokens")) is not None:  # Anthropic's input is without these.
            cached = read
            prompt = None if prompt is None else prompt + read + (_count(usage, "cache_creation_input_tokens") or 0)
        self._note(
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=_count(usage, "completion_tokens", "output_tokens"),
            reasoning_tokens=_count(usage, *_REASONING),
        )

    def _read_numbers(self, event: Event) -> None:
        """Note what engines say in fields of their own."""
        for name, (field, *path), unit_ns in _TIMES:
            if (value := getattr(event, field)) is not None:
                self._note(**{name: _duration_ns(at(value, *path), unit_ns)})
        if event.timings is not None:  # llama.cpp: prompt_n were computed, cache_n came from its cache
            computed, cached = (_count(event.timings, name) for name in ("prompt_n", "cache_n"))
            if computed is not None and cached is not None:
                self.cached_tokens = cached
                self.prompt_tokens = self.prompt_tokens or computed + cached
            self.completion_tokens = self.completion_tokens or _count(event.timings, "predicted_n")
        self._note(  # Ollama
            prompt_tokens=count_of(event.prompt_eval_count),
            cached_tokens=count_of(event.prompt_eval_cached_count),
            completion_tokens=count_of(event.eval_count),
        )

    def _note(self, **numbers: int | None) -> None:
        """Note the numbers that are there."""
        for name, number in numbers.items():
            if number is not None:
                setattr(self, name, number)


class Reading:
    """Reads one answer as it passes. `unread` says why it can't be read, if so."""

    def __init__(self, content_type: bytes, *, is_coded: bool) -> None:
        self.told = Told()
        self.unread = "it has a content coding" if is_coded else ""
        self.is_events = content_type.startswith(EVENT_STREAM)
        self.is_stream = self.is_events or content_type.startswith(LINES)
        if not self.is_stream and not content_type.startswith(JSON):
            self.unread = f"its type is {content_type.decode('latin-1')[:40] or 'missing'}"
        self._parts: list[bytes] = []  # parts to read later, several at once; the next list has their times of arrival
        self._times_ns: list[int] = []
        self._rest = bytearray()  # the event, or the answer, that has not ended
        self._tail = b""  # the last four bytes, whether they can be read or not
        self._has_begun = False

    @property
    def is_between(self) -> bool:
        """Return whether the bytes so far end with a whole event."""
        self._read()
        return not self._tail or self._tail.replace(b"\r", b"").endswith(b"\n\n")

    def push(self, part: bytes, now_ns: int) -> None:
        """Take a part of the answer."""
        self._parts.append(part)
        self._times_ns.append(now_ns)
        if len(self._parts) == MOST_TOGETHER or len(part) > LARGE_PART_BYTES:
            self._read()

    def end(self, now_ns: int) -> None:
        """Read what is left: a whole answer, or a last line without its end."""
        self._read()
        if self.unread:
            return
        if self.is_stream:
            self._read_line(bytes(self._rest).rstrip(b"\r"), now_ns)
        elif self._rest.strip():
            self._read_object(self._rest, now_ns)
        self._rest = bytearray()

    def _read(self) -> None:
        """Read the parts that have come."""
        parts = self._parts
        times_ns = self._times_ns
        self._parts = []
        self._times_ns = []
        self._tail = b"".join((self._tail, *parts[-4:]))[-4:]
        if not self._have_read_texts(parts, times_ns):
            for part, now_ns in zip(parts, times_ns, strict=True):
                if not self._have_read_texts([part], [now_ns]):
                    self._read_part(part, now_ns)

    def _have_read_texts(self, parts: Sequence[bytes], times_ns: Sequence[int]) -> bool:
        """Read parts, and return True, if they are events like those before, with nothing to note but their text. Most
        are, and to decode each of them would take a multiple of the time."""
        if not (parts and self._has_begun and self.is_events) or self._rest or self.unread:
            return False
        whole = b"".join(parts)
        number = whole.count(b'data: {"')
        if not (whole.count(b"}\n\n") == number and whole.count(b"\n") == 2 * number):
            return False
        if not all(part.startswith(b'data: {"') and part.endswith(b"}\n\n") for part in parts):
            return False
        if any(map(whole.__contains__, _NOTED)):
            return False
        if number > len(parts):
            times_ns = [at for part, at in zip(parts, times_ns, strict=True) for _ in range(part.count(b"\n\n"))]
        self.told.texts_came(times_ns)
        return True

    def _read_part(self, part: bytes, now_ns: int) -> None:
        if self.unread:
            return
        self._has_begun = True
        self._rest += part
        if self.is_stream and b"\n" in part:
            *lines, self._rest = self._rest.split(b"\n")
            for line in lines:
                self._read_line(line.rstrip(b"\r"), now_ns)
        if len(self._rest) > MOST_EVENT_BYTES:
            self._give_up(f"more than {MOST_EVENT_BYTES} bytes in one piece")

    def _read_line(self, line: bytes | bytearray, now_ns: int) -> None:
        if self.is_events:
            if not line.startswith(b"data:"):
                return  # a comment, the end of an event, or a field that says nothing more
            line = line[5:].strip()
        if line not in (b"", b"[DONE]"):
            self._read_object(line, now_ns)

    def _read_object(self, content: bytes | bytearray, now_ns: int) -> None:
        if self.unread:
            return
        try:
            self.told.read(_event.decode(content), now_ns)
        except UNREADABLE:
            self._give_up("it is no JSON object")

    def _give_up(self, why: str) -> None:
        self.unread = why
        self._rest = bytearray()


def is_comment(part: bytes) -> bool:
    """Return whether a part of a stream consists of comments alone, which only keep a connection alive."""
    lines = [line for line in part.splitlines() if line]
    return bool(lines) and all(line.startswith(b":") for line in lines)


def at(value: Any, *path: str) -> Any:
    """Return the value at a path in objects of JSON, or None."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _count(value: Any, *paths: str) -> int | None:
    """Return the first number that is there, of those at paths such as "details.number"."""
    numbers = (count_of(at(value, *path.split("."))) for path in paths)
    return next((number for number in numbers if number is not None), None)


def count_of(value: Any) -> int | None:
    """Return a value that is a count, or None."""
    return value if type(value) is int and 0 <= value < 2**48 else None


def _duration_ns(value: Any, per_unit: float) -> int | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value * per_unit < 2**62:
        return int(value * per_unit)
    return None
