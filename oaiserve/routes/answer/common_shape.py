"""Renders the common parts of chat and completions: chunks, whole answers, usage.

Large values are rendered piece by piece while they are written, because an answer in JSON takes five times the memory
of its events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.request import PromptDone, PromptProgress, Usage
from oaiserve.facts.record import ReadAgain
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.logprobs import PromptLogprobs
from oaiserve.routes.answer.shape import ACTIVITY_SECONDS, Timings
from oaiserve.routes.exchange import RequestTimings
from oaiserve.routes.intake.parameters import Wanted
from oaiserve.routes.intake.read import Head

encode = msgspec.json.Encoder().encode
Choice = TypeVar("Choice", bound=msgspec.Struct)
_OWN_CALL_ID = re.compile("call_[0-9a-f]{32}")
HOLE = msgspec.Raw(b"\0")  # stands for a value that is rendered in parts; JSON itself never has this byte


def call_id(response_id: str, choice: int, number: int, prefix: str = "call_") -> str:
    """Return the id of a call in an answer, which is the same on every server that may finish the answer."""
    return f"{prefix}{sha256(f'{response_id} {choice} {number}'.encode()).hexdigest()[:32]}"


def is_own_call_id(value: object) -> bool:
    """Return whether `call_id` has probably made this id, on any server."""
    return isinstance(value, str) and _OWN_CALL_ID.fullmatch(value) is not None


class _Object(msgspec.Struct):
    """The first keys of each JSON object of an answer."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class PromptTokensDetails(msgspec.Struct):
    """The number of prompt tokens found in the prefix cache, and of those for images and sounds, if there are any. With
    the header x-include-reuse, also of those that were read again, and why."""

    cached_tokens: int
    image_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    read_again_tokens: int | UnsetType = UNSET
    read_again_reason: ReadAgain | UnsetType | None = UNSET


class CompletionTokensDetails(msgspec.Struct):
    """The number of tokens in the answer that are reasoning. A field that is UNSET is left out."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET  # tokens of drafts, if the request has a prediction
    rejected_prediction_tokens: int | UnsetType = UNSET
    max_tokens_cut_to: int | UnsetType = UNSET  # the new limit, if the context had no room for the requested one


class Cost(msgspec.Struct):
    """A request's shares of what the server used, as docs/costs.md describes them. None: the share is unknown."""

    core_ns: int | None
    machine_ns: int | None
    alone_ns: int | None
    alone_core_ns: int | None
    kv_byte_seconds: float | None
    weight_bytes: int | None
    joules: float | None
    price: float | None


class TokenUsage(msgspec.Struct):
    """The tokens of a request. Each prompt counts once, and all choices count."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    oaiserve_cost: Cost | UnsetType = UNSET  # set if the header x-include-cost requests it


class Progress(msgspec.Struct):
    """The progress of a prompt, in tokens. The first four fields are llama.cpp's. A field that is UNSET is left out."""

    total: int
    cache: int
    processed: int  # including tokens from the cache
    time_ms: int
    rest_ms: int | UnsetType = UNSET  # estimated time of the rest, once known


class StreamChunk(_Object, Generic[Choice]):
    """The JSON of one event of a stream. A field that is UNSET is left out."""

    prompt_progress: Progress | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    choices: Sequence[Choice] = ()
    usage: TokenUsage | UnsetType | None = UNSET
    timings: RequestTimings | UnsetType = UNSET


class Whole(_Object, Generic[Choice]):
    """The JSON of an answer that is not streamed. A field that is UNSET is left out. Raw values are rendered in parts;
    the other types in their unions are for the schema."""

    choices: list[Choice] | msgspec.Raw
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | msgspec.Raw | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChoicesShape:
    """Renders answers with choices: the part of `Shape` that chat and completions share."""

    activity_seconds = ACTIVITY_SECONDS
    is_numbered = False
    empty_choice: msgspec.Struct  # the choice in a chunk that adds nothing

    def __init__(self, kind: str, head: Head, wanted: Wanted, num_prompts: int = 1) -> None:
        self._num_left = num_prompts  # prompts that are not computed yet
        self._first_values = (head.id, kind, head.created, head.model, head.system_fingerprint)
        self._wanted = wanted
        self._usage = Usage(0, 0, 0)  # usage of the answer so far
        # The frame of an event stays the same for the whole stream, and encoding it once saves a third of an event's
        # time. Quotes within JSON strings are escaped, so the separator occurs only once.
        before, after = self._chunk_event(()).split(b'"choices":[]')
        self._before = before + b'"choices":['
        self._after = b"]" + after

    def begun(self, _event: PromptProgress) -> bytes:
        return b""  # The first chunk comes with the first token.

    def progress(self, event: PromptProgress) -> bytes:
        if not self._wanted.progress:
            return progress_comment(event)
        rest_ms = UNSET if event.rest_ns is None else event.rest_ns // 1_000_000
        tokens = (event.num_tokens, event.num_cached, event.num_computed)
        time_ms = event.elapsed_ns // 1_000_000
        return self._chunk_event((), prompt_progress=Progress(*tokens, time_ms, rest_ms))

    def activity(self) -> bytes:
        return self._event(self.empty_choice)

    def finished(self, usage: Usage, timings: Timings) -> Iterator[bytes]:
        """Render the end of the stream. Only requests for usage or timings get a chunk without choices, because other
        clients read choices[0] of every chunk."""
        more: dict[str, Any] = {}
        if self._wanted.include_usage:
            more["usage"] = self._usage_object(usage)
        if self._wanted.include_timings:
            more["timings"] = timings(usage)
        yield self._chunk_event((), **more) + sse.DONE if more else sse.DONE

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(encode(error)) + sse.DONE

    def _computed(self, event: PromptDone) -> Iterator[bytes]:
        """Count a prompt. After the last one, render the end of the progress: all tokens, computed or cached."""
        self._add_usage(event)
        self._num_left -= 1
        if self._wanted.progress and self._num_left == 0:
            times = event.times
            usage = self._usage
            time_ms = ((times.first_token or 0) - (times.scheduled or 0)) // 1_000_000
            progress = Progress(usage.prompt_tokens, usage.cached_tokens, usage.prompt_tokens, time_ms)
            yield self._chunk_event((), prompt_progress=progress)

    def _add_usage(self, event: PromptDone) -> None:
        self._usage.prompt_tokens += len(event.token_ids)
        self._usage.cached_tokens += event.cached_tokens

    def _event(self, choice: msgspec.Struct) -> bytes:
        if self._wanted.continuous_usage:
            return self._chunk_event((choice,))
        return self._before + sse.one_line(encode(choice)) + self._after

    def _chunk_event(self, choices: Sequence[msgspec.Struct], **more: Any) -> bytes:
        if self._wanted.include_usage:
            more.setdefault("usage", self._usage_object(self._usage) if self._wanted.continuous_usage else None)
        return sse.event(encode(StreamChunk(*self._first_values, choices=choices, **more)))

    def _whole(
        self, choices: Iterable[Iterable[bytes]], usage: Usage, *after: Iterable[bytes], **more: Any
    ) -> Iterator[bytes]:
        """Render a whole answer. `choices` are rendered one by one. `after` has the parts that fill the holes in
        `more`."""
        frame = encode(Whole(*self._first_values, HOLE, self._usage_object(usage), **more))
        return filled(frame, joined(choices), *after)

    def _usage_object(self, usage: Usage) -> TokenUsage:
        return usage_object(usage)


def usage_object(usage: Usage, reasoning_tokens: int = 0) -> TokenUsage:
    accepted, rejected = usage.predicted_tokens or (UNSET, UNSET)
    again, reason = usage.read_again or (UNSET, UNSET)
    return TokenUsage(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(
            usage.cached_tokens, usage.image_tokens or UNSET, usage.audio_tokens or UNSET, again, reason
        ),
        CompletionTokensDetails(reasoning_tokens, accepted, rejected, told_cut(usage)),
        told_cost(usage),
    )


def progress_comment(event: PromptProgress) -> bytes:
    return sse.comment(f"{event.num_computed} of {event.num_tokens} prompt tokens")


def told_cut(usage: Usage) -> int | UnsetType:
    if usage.max_tokens_cut_to is None:
        return UNSET
    return usage.max_tokens_cut_to


def told_cost(usage: Usage) -> Cost | UnsetType:
    account = usage.account
    if account is None:
        return UNSET
    return Cost(*(getattr(account, name) for name in Cost.__struct_fields__))


def filled(frame: bytes, *fillings: Iterable[bytes]) -> Iterator[bytes]:
    """Yield JSON in parts, with its holes filled."""
    before, *others = frame.split(b"\0")
    yield before
    for filling, after in zip(fillings, others, strict=True):
        yield from filling
        yield after


def joined(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    separator = b"["
    for item in items:
        yield separator
        yield from item
        separator = b","
    yield b"[]" if separator == b"[" else b"]"
