"""Renders log-probabilities in pieces, in the forms of chat, completions and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from itertools import islice, starmap
from typing import Any, TypeVar

import msgspec

from oaiserve.engine.event_streams import MAX_CHUNK_TOKENS
from oaiserve.engine.request import TokenChunk
from oaiserve.engine.types.logprobs import Entry, TokenLogprobs, text_of

encode = msgspec.json.Encoder().encode

T = TypeVar("T")


class TopToken(msgspec.Struct):
    """A token with its log-probability. -9999 stands for minus infinity. `bytes` may be part of a character."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ContentToken(TopToken):
    """A token of the content, and the likeliest tokens at its position, likeliest first."""

    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of the tokens of a message's content."""

    content: list[ContentToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """Four lists with an item for each token. The first token of a prompt has no log-probability: it is null.

    A token's part of the text begins at its `text_offset`, and ends at that of the next token. `tokens` has these
    parts, and the names of special tokens, which add no text. A character that is split over several tokens is part of
    the last of them.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    text_offset: list[int]
    top_logprobs: list[dict[str, float | None] | None]


class PromptLogprob(msgspec.Struct):
    """The log-probability of a token in the prompt, or of an alternative at its position. `rank` counts from 1, in the
    whole vocabulary."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # keyed by token id; null for the first prompt token


def drop_end_logprob(chunk: TokenChunk) -> None:
    """Drop the log-probability of a token that only ended the choice: chat and responses list only tokens of the
    content.

    Completions keep it, because evaluations count one entry for each token.
    """
    if chunk.has_end_token and chunk.logprobs is not None:
        chunk.logprobs.truncate(len(chunk.token_ids) - 1)


def chat_logprobs_in_parts(tokens: TokenLogprobs, num_top: int) -> Iterator[bytes]:
    yield b'{"content":'
    yield from chat_entries_in_parts(tokens, num_top)
    yield b',"refusal":null}'


def chat_entries(rows: Iterable[list[Entry]], num_top: int) -> list[ContentToken]:
    def values(_: int, data: bytes, logprob: float) -> tuple[str, float | None, list[int] | None]:
        return text_of(data), _value(logprob), list(data) or None

    return [ContentToken(*values(*token), [TopToken(*values(*one)) for one in top[:num_top]]) for token, *top in rows]


def chat_entries_in_parts(tokens: TokenLogprobs, num_top: int) -> Iterator[bytes]:
    return _list(chat_entries(batch, num_top) for batch in _batches(tokens.entries(), 1 + num_top))


def completion_logprobs_in_parts(
    tokens: TokenLogprobs, parts: Iterable[str], num_top: int, special_ids: Collection[int] = (), text_offset: int = 0
) -> Iterator[bytes]:
    """Yield OpenAI's four lists of equal length, with each token's part of the text.

    `text_offset` is the number of characters before the first of these tokens.
    """
    names: list[str] = []
    offsets: list[int] = []

    def name(token: Entry, part: str) -> str:
        nonlocal text_offset
        offsets.append(text_offset)
        text_offset += len(part)
        names.append(text_of(token[1]) if not part and token[0] in special_ids else part)
        return names[-1]

    yield b'{"tokens":'
    named = zip(tokens.tokens(), parts, strict=True)
    yield from _list(list(starmap(name, batch)) for batch in _batches(named, 1))
    yield b',"token_logprobs":'
    yield from _list([_value(logprob) for _, _, logprob in batch] for batch in _batches(tokens.tokens(), 1))
    yield b',"text_offset":'
    yield from _list(_batches(offsets, 1))
    yield b',"top_logprobs":'
    rows = zip(tokens.entries(), names, strict=True)
    yield from _list(_best(batch, num_top) for batch in _batches(rows, 1 + num_top))
    yield b"}"


def prompt_logprobs_in_parts(tokens: TokenLogprobs, num_top: int) -> Iterator[bytes]:
    rows = zip(tokens.entries(), tokens.ranks, strict=True)
    return _list(_by_token_id(batch, num_top) for batch in _batches(rows, 1 + num_top))


def _batches(tokens: Iterable[T], num_entries: int) -> Iterator[list[T]]:
    """Yield the tokens in batches, each of which is rendered within half a millisecond."""
    rest = iter(tokens)
    while batch := list(islice(rest, max(1, MAX_CHUNK_TOKENS // num_entries))):
        yield batch


def _list(batches: Iterable[list[Any]]) -> Iterator[bytes]:
    separator = b"["
    for batch in batches:
        yield separator + encode(batch)[1:-1]
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _value(logprob: float) -> float | None:
    """Return the log-probability as JSON can hold it: -9999 for minus infinity, as OpenAI writes it, and None for the
    NaN of a prompt's first token."""
    if logprob > -9999.0:
        return logprob
    if math.isnan(logprob):
        return None
    return -9999.0


def _best(rows: Iterable[tuple[list[Entry], str]], num_top: int) -> list[dict[str, float | None] | None]:
    rows_of_best: list[dict[str, float | None] | None] = []
    for (token, *top), name in rows:
        if math.isnan(token[2]):
            rows_of_best.append(None)
            continue
        best: dict[str, float | None] = {}
        # The token itself may be listed in addition to the num_top likeliest.
        for token_id, data, logprob in [*top[:num_top], token]:
            # The likeliest of tokens with equal texts is kept.
            best.setdefault(name if token_id == token[0] else text_of(data), _value(logprob))
        rows_of_best.append(best)
    return rows_of_best


def _by_token_id(rows: Iterable[tuple[list[Entry], int]], num_top: int) -> PromptLogprobs:
    positions: PromptLogprobs = []
    for (token, *top), own_rank in rows:
        if math.isnan(token[2]):
            positions.append(None)
            continue
        ranked = [*enumerate(top[:num_top], start=1), (own_rank, token)]
        positions.append(
            {
                str(token_id): PromptLogprob(_value(logprob), rank, text_of(data))
                for rank, (token_id, data, logprob) in ranked
            }
        )
    return positions
