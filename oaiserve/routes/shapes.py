"""What the answers of both generation routes share: chunk framing, usage, logprobs. Pure functions of engine events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from oaiserve.engine.request import TokenLogprob, TopLogprob, Usage
from oaiserve.routes.protocol import Wanted

encode = msgspec.json.encode
Timings = Callable[[Usage], Mapping[str, Any]]  # asked at the end of a stream, for clients that want to know


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer begins with, streamed or not."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


class ChunkFrame:
    """Wraps choices into SSE events. What stays the same for a whole stream is encoded once."""

    def __init__(self, head: Head, wanted: Wanted) -> None:
        self._start = b"data: " + encode(head.fields())[:-1]
        self._end = b'],"usage":null}\n\n' if wanted.include_usage else b"]}\n\n"
        self._wanted = wanted
        self.usage = Usage(0, 0, 0)  # counted up by the shape

    def chunk(self, choice: bytes, top_level: bytes = b"") -> bytes:
        end = self._end
        if self._wanted.continuous_usage:
            end = b'],"usage":' + encode(usage_object(self.usage)) + b"}\n\n"
        return self._start + top_level + b',"choices":[' + choice + end

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        """The one chunk without choices, and only for clients that asked: others read choices[0] blindly."""
        more = b""
        if self._wanted.include_usage:
            more += b',"usage":' + encode(usage_object(usage))
        if self._wanted.include_timings:
            more += b',"timings":' + encode(timings(usage))
        return self._start + b',"choices":[]' + more + b"}\n\n" if more else b""


def usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def logprob_value(logprob: float) -> float | None:
    """JSON has no infinity: OpenAI writes -9999. NaN, at a prompt's first token, is null."""
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
    """Four lists of equal length. `text_offset` counts the characters of the choice's tokens before these."""
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
        for top in [*token.top[:num_top], token]:  # the best ones and the token itself, so maybe one more
            best.setdefault(token_text(top, as_token_ids), logprob_value(top.logprob))  # of equal texts the best stays
        tops.append(best)
    return {"tokens": texts, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": tops}


def prompt_logprobs_object(tokens: Iterable[TokenLogprob], num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's form: by token id; `rank` counts from 1 and is null for a token that is not among the best."""
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
