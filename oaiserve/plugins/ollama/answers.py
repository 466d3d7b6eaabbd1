"""Ollama's answers, made of those of OpenAI's routes: one object, or a line of JSON for each event of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.plugins.ollama.options import in_their_names
from oaiserve.routes.answer import sse

encode = msgspec.json.Encoder().encode


# -- what Ollama's clients get ----------------------------------------------------------------------------------------


class AnswerFunction(msgspec.Struct, kw_only=True):
    """The function of a call, with its arguments."""

    index: int
    name: str
    arguments: dict[str, Any]


class AnswerCall(msgspec.Struct, kw_only=True):
    """A call of a tool, for the client to make."""

    id: str
    function: AnswerFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True):
    """The message of an answer, or what a line adds to it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    """The fields of all answers. Durations are in nanoseconds, and in the last line of a stream."""

    model: str
    created_at: str
    done: bool = True
    done_reason: Literal["stop", "length", "load"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    """The answer to a conversation, or a line of it."""

    message: OllamaAnswerMessage


class GenerateAnswer(_Answer, kw_only=True):
    """The answer to a prompt, or a line of it."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class EmbedTextsAnswer(msgspec.Struct):
    """The vectors of texts, in their order."""

    model: str
    embeddings: list[list[float]] | msgspec.Raw
    total_duration: int
    prompt_eval_count: int
    load_duration: int = 0


class EmbedTextAnswer(msgspec.Struct, kw_only=True):
    """The vector of a text."""

    embedding: list[float] | msgspec.Raw


class OllamaError(msgspec.Struct):
    """An error: the whole answer, or the last line of a stream."""

    error: str


# -- what OpenAI's routes say -----------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    function: _Function
    index: int = 0
    id: str = ""


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] = []


class _Logprobs(msgspec.Struct):
    content: list[Any] | None = None


class _Choice(msgspec.Struct):
    message: _Said | None = None
    delta: _Said | None = None
    text: str = ""  # the answer of a completion
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Timings(msgspec.Struct):
    phases_ns: dict[str, int]


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: _Error | None = None


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage


_event = msgspec.json.Decoder(_Event).decode
_vectors = msgspec.json.Decoder(_Vectors).decode


def error_in(content: bytes) -> _Error:
    """Return the error in an answer that refuses a request; an empty one if it cannot be read."""
    try:
        return _event(content).error or _Error()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Error()


def time_text(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat().replace("+00:00", "Z")


def phases_in(server_timing: str) -> dict[str, int]:
    """Return the phases in the header `server-timing`, in nanoseconds."""
    parts = [part.strip().partition(";dur=") for part in server_timing.split(",")]
    return {name: round(float(value) * 1e6) for name, _, value in parts if value}


class Translation:
    """Turns one answer of chat or completions into one of `kind`. A stream sends a call when it is complete."""

    def __init__(self, kind: type[OllamaChatAnswer | GenerateAnswer], model: str, unix_seconds: float) -> None:
        self._is_chat = kind is OllamaChatAnswer
        self._same: dict[str, Any] = {"model": model, "created_at": time_text(unix_seconds)}
        self._call: _Call | None = None  # the one that is being written
        self._reason = "stop"
        self._usage = _Usage()
        self._phases: Mapping[str, int] = {}
        self._rest = b""  # the beginning of an event
        self.is_over = False

    def lines(self, part: bytes) -> Iterator[bytes]:
        """Yield the lines for the next part of a stream of server-sent events."""
        *blocks, self._rest = (self._rest + part).split(sse.END)
        for block in blocks:
            for line in block.split(b"\n"):
                if line.startswith(b":"):  # A comment keeps a connection alive, and so does an empty line of ours.
                    yield self._line()
                elif line == b"data: [DONE]":
                    if not self.is_over:
                        yield self._line(**self._end())
                    self.is_over = True
                elif line.startswith(b"data: "):
                    yield from self._lines_of(_event(line.removeprefix(b"data: ")))

    def whole(self, content: bytes, server_timing: str) -> bytes:
        """Return the answer for a whole one, with the phases in its header."""
        event = _event(content)
        (choice,) = event.choices
        said = choice.message or _Said(choice.text)
        self._take_end(event)
        self._phases = phases_in(server_timing)
        calls = [_complete(call, index) for index, call in enumerate(said.tool_calls)]
        text = "".join([said.content or "", *(call for call in calls if isinstance(call, str))])
        more = {} if choice.logprobs is None else {"logprobs": choice.logprobs.content or []}
        complete = [call for call in calls if not isinstance(call, str)]
        return encode(self._answer(text, said.reasoning or "", complete, **self._end(), **more))

    def loaded(self) -> bytes:
        """Return the answer to a request without a prompt, which only wants the model to be loaded."""
        return encode(self._answer(done_reason="load"))

    def _failed(self, message: str) -> bytes:
        self.is_over = True
        return sse.one_line(encode(OllamaError(in_their_names(message)))) + b"\n"

    def _lines_of(self, event: _Event) -> Iterator[bytes]:
        if event.error is not None:
            yield self._failed(event.error.message)
            return
        self._take_end(event)
        for choice in event.choices:
            said = choice.delta or _Said(choice.text)
            for call in said.tool_calls:
                if self._call is None or call.index != self._call.index:
                    yield from self._end_of_call()
                    self._call = _Call(_Function(call.function.name), call.index, call.id)
                self._call.function.arguments += call.function.arguments
            if choice.finish_reason is not None or said.content:
                yield from self._end_of_call()
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            if said.content or said.reasoning or logprobs:
                more = {"logprobs": logprobs} if logprobs else {}
                yield self._line(said.content or "", said.reasoning or "", **more)

    def _take_end(self, event: _Event) -> None:
        self._usage = event.usage or self._usage
        self._phases = self._phases if event.timings is None else event.timings.phases_ns
        for choice in event.choices:
            if choice.finish_reason is not None:
                self._reason = "length" if choice.finish_reason == "length" else "stop"

    def _end_of_call(self) -> Iterator[bytes]:
        if self._call is not None:
            call = _complete(self._call, self._call.index)
            yield self._line(call) if isinstance(call, str) else self._line(calls=[call])
        self._call = None

    def _line(self, content: str = "", thinking: str = "", calls: list[AnswerCall] | None = None, **more: Any) -> bytes:
        return sse.one_line(encode(self._answer(content, thinking, calls, **{"done": False, **more}))) + b"\n"

    def _answer(
        self, content: str = "", thinking: str = "", calls: list[AnswerCall] | None = None, **more: Any
    ) -> OllamaChatAnswer | GenerateAnswer:
        if not self._is_chat:
            return GenerateAnswer(response=content, thinking=thinking or UNSET, **self._same, **more)
        message = OllamaAnswerMessage(content=content, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return OllamaChatAnswer(message=message, **self._same, **more)

    def _end(self) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": sum(self._phases.values()),
            "load_duration": 0,
            "prompt_eval_count": self._usage.prompt_tokens,
            "prompt_eval_duration": self._phases.get("prefill", 0),
            "eval_count": self._usage.completion_tokens,
            "eval_duration": self._phases.get("decode", 0),
        }


def _complete(call: _Call, index: int) -> AnswerCall | str:
    """Return a call in Ollama's form. A call whose arguments are no JSON object was truncated or is broken. Return only
    its text then, because clients run every call that they get."""
    function = call.function
    try:
        arguments = msgspec.json.decode(function.arguments or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return f'{{"name": {encode(function.name).decode()}, "arguments": {function.arguments}'
    return AnswerCall(id=call.id, function=AnswerFunction(index=index, name=function.name, arguments=arguments))


def embed_answer(model: str, content: bytes, server_timing: str) -> bytes:
    """Return the answer of /api/embed for one of /v1/embeddings, with the phases in its header."""
    vectors = _vectors(content)
    rows = msgspec.Raw(b"[" + b",".join(each.embedding for each in vectors.data) + b"]")
    total_ns = sum(phases_in(server_timing).values())
    return encode(EmbedTextsAnswer(model, rows, total_ns, vectors.usage.prompt_tokens))


def older_embed_answer(content: bytes, _server_timing: str) -> bytes:
    (vector,) = _vectors(content).data
    return encode(EmbedTextAnswer(embedding=vector.embedding))
