"""Renders what the answers of chat and completions have in common: chunks, usage, log-probabilities."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.request import TokenChunk, TokenLogprob, TopLogprob, Usage
from oaiserve.routes import sse
from oaiserve.routes.protocol import Wanted
from oaiserve.routes.respond import Timings

encode = msgspec.json.Encoder().encode
DONE = sse.event(b"[DONE]")


@dataclass(frozen=True, slots=True)
class Head:
    """The values that identify an answer. Every JSON object of the answer repeats them."""

    id: str
    created: int  # Unix seconds
    model: str
    system_fingerprint: str


class _Object(msgspec.Struct):
    """The keys that every JSON object of an answer begins with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Chunk(_Object):
    """The JSON of one event of a stream. A field that is UNSET is left out."""

    prompt_token_ids: list[int] | UnsetType = UNSET
    choices: Sequence[msgspec.Struct] = ()
    usage: Mapping[str, Any] | UnsetType | None = UNSET
    timings: Mapping[str, Any] | UnsetType = UNSET


class Whole(_Object):
    """The JSON of an answer that is not streamed. A field that is UNSET is left out."""

    choices: Sequence[msgspec.Struct]
    usage: Mapping[str, Any]
    prompt_logprobs: Sequence[Any] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChoicesShape(ABC):
    """Renders an answer that is a list of choices. This is the part of `respond.Shape` that chat and completions share:
    each adds `prompt`, `whole`, and its own choices."""

    def __init__(self, kind: str, head: Head, wanted: Wanted) -> None:
        self._first_values = (head.id, kind, head.created, head.model, head.system_fingerprint)
        self._wanted = wanted
        self._usage = Usage(0, 0, 0)  # of what was rendered so far
        # The frame of an event stays the same for the whole stream, and encoding it once saves a third of an event's
        # time. Quotes within JSON strings are escaped, so the separator occurs only once.
        before, after = self._chunk_event(()).split(b'"choices":[]')
        self._before, self._after = before + b'"choices":[', b"]" + after

    @abstractmethod
    def _text_choice(self, chunk: TokenChunk) -> msgspec.Struct:
        """Return the text, and what else the choice has gained, without the finish reason."""

    @abstractmethod
    def _end_choice(self, chunk: TokenChunk) -> msgspec.Struct:
        """Return the end of the choice: the finish reason without any text."""

    def delta(self, chunk: TokenChunk) -> bytes:
        self._usage.completion_tokens += len(chunk.token_ids)
        events = b""
        if chunk.text or chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids):
            events = self._event(self._text_choice(chunk))
        if chunk.finish_reason is not None:
            # The end is a chunk of its own, because clients drop the text of a chunk that has a finish reason.
            events += self._event(self._end_choice(chunk))
        return events

    def finished(self, usage: Usage, timings: Timings) -> bytes:
        """Render the end of the stream. A chunk without choices goes only to clients that asked for usage or timings,
        because others read choices[0] of every chunk."""
        more: dict[str, Any] = {}
        if self._wanted.include_usage:
            more["usage"] = usage_object(usage)
        if self._wanted.include_timings:
            more["timings"] = timings(usage)
        return self._chunk_event((), **more) + DONE if more else DONE

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(encode(error)) + DONE

    def _event(self, choice: msgspec.Struct) -> bytes:
        if self._wanted.continuous_usage:
            return self._chunk_event((choice,))
        return self._before + encode(choice) + self._after

    def _chunk_event(self, choices: Sequence[msgspec.Struct], **more: Any) -> bytes:
        if self._wanted.include_usage:
            more.setdefault("usage", usage_object(self._usage) if self._wanted.continuous_usage else None)
        return sse.event(encode(Chunk(*self._first_values, choices=choices, **more)))

    def _encode_whole(self, choices: Sequence[msgspec.Struct], usage: Usage, **more: Any) -> bytes:
        return encode(Whole(*self._first_values, choices, usage_object(usage), **more))


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprob_value(logprob: float) -> float | None:
    """Return the log-probability as JSON can hold it: -9999 for minus infinity, as OpenAI writes it, and None for the
    NaN of a prompt's first token."""
    return None if math.isnan(logprob) else max(logprob, -9999.0)


def token_text(token: TopLogprob, as_token_ids: bool) -> str:
    return f"token_id:{token.token_id}" if as_token_ids else token.token


def chat_logprobs(tokens: Iterable[TokenLogprob], num_top: int, as_token_ids: bool) -> dict[str, Any]:
    def entry(token: TopLogprob) -> dict[str, Any]:
        return {
            "token": token_text(token, as_token_ids),
            "logprob": logprob_value(token.logprob),
            "bytes": list(token.bytes) or None,
        }

    content = [entry(token) | {"top_logprobs": [entry(top) for top in token.top[:num_top]]} for token in tokens]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokens: Iterable[TokenLogprob], num_top: int, as_token_ids: bool, text_offset: int = 0
) -> dict[str, Any]:
    """Return OpenAI's four lists of equal length. `text_offset` is the number of characters in the tokens of the choice
    that come before these."""
    texts: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    tops: list[dict[str, float | None] | None] = []
    for token in tokens:
        text = token_text(token, as_token_ids)
        texts.append(text)
        logprobs.append(logprob_value(token.logprob))
        offsets.append(text_offset)
        text_offset += len(token.token)
        if math.isnan(token.logprob):
            tops.append(None)
            continue
        best: dict[str, float | None] = {}
        for top in [*token.top[:num_top], token]:  # the token itself may be one more than num_top
            # Of tokens with equal texts the likeliest is kept.
            best.setdefault(token_text(top, as_token_ids), logprob_value(top.logprob))
        tops.append(best)
    return {"tokens": texts, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": tops}


def prompt_logprobs_object(tokens: Iterable[TokenLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """Return the log-probabilities in vLLM's form, by token id. `rank` counts from 1, and is null for a token that is
    not among the best."""
    entries: list[dict[str, Any] | None] = []
    for token in tokens:
        if math.isnan(token.logprob):
            entries.append(None)
            continue
        ranks = {top.token_id: rank for rank, top in enumerate(token.top, start=1)}
        entries.append(
            {
                str(top.token_id): {
                    "logprob": logprob_value(top.logprob),
                    "rank": ranks.get(top.token_id),
                    "decoded_token": top.token,
                }
                for top in [*token.top[:num_top], token]
            }
        )
    return entries
