"""Compares the prompts of a client with each other, as texts and turns, to say what an engine could have had cached.

Tokens are unknown here, so texts are compared in pieces of four bytes. The engine's numbers of tokens scale the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from oaiserve.engine.request import PromptDone
from oaiserve.explain.reuse.outline import Outline, Part, part_of
from oaiserve.explain.reuse.recent_prompts import RecentPrompts, Reuse
from oaiserve.facts.record import ReadAgain
from oaiserve.facts.times import duration
from oaiserve.plugins.gateway.client_request import LARGE_BYTES
from oaiserve.plugins.gateway.engines.identity import SGLANG, VLLM
from oaiserve.plugins.gateway.engines.reading import Told
from oaiserve.plugins.gateway.engines.times import PassedTimes
from oaiserve.plugins.gateway.sources import UNREADABLE
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.prompt_reuse import session_in
from oaiserve.telemetry.reuse_explanation import HELPS, why
from oaiserve.wire.prefix_keys import BYTES_PER_TOKEN, MEDIUM_BYTES, SYSTEM_ROLES, without_billing

SAID = "read_again"  # the name of the note in the account
LEAST_SHARE = 0.1  # smallest share of a prompt that is reported
PIECE_BLOCK = 16  # in pieces; shorter repetitions are not reported
MOST_COMPARED_BYTES = 4 * 2**20
_MEDIA = ("image_url", "input_image", "image", "input_audio")
_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "thinking", "think", "response_format", "format")
# These flags make an engine report its cached tokens.
_REPORTS_CACHED = {
    VLLM: "; vLLM does with --enable-prompt-tokens-details",
    SGLANG: "; SGLang does with --enable-cache-report, unless none were",
}
# The text is the same, so the engine could have had it cached.
_UNCHANGED = (ReadAgain.EVICTED, ReadAgain.NOT_YET, ReadAgain.OFF, ReadAgain.STATE)

_encode = msgspec.json.Encoder(order="sorted").encode


class SentPrompt(NamedTuple):
    """A prompt as its client has sent it: its parts, and its text in pieces."""

    outline: Outline
    pieces: Sequence[int]
    session: str  # as the body names it


class PromptReader:
    """Reads the prompt of a request that an engine has: a large one in a thread while the engine works, and a small one
    when its answer has ended, so that an engine that answers at once is not kept waiting."""

    def __init__(self, body: bytes | bytearray, model: str) -> None:
        self._in_thread: asyncio.Task[SentPrompt | None] | None = None
        self._read = partial(prompt_in, body, model)
        if len(body) > LARGE_BYTES:
            self._in_thread = asyncio.create_task(asyncio.to_thread(self._read))

    def result(self) -> SentPrompt | None:
        """Return the prompt, or None if it can't be read, or has not been read yet."""
        if self._in_thread is None:
            return self._read()
        reader = self._in_thread
        return reader.result() if reader.done() and not reader.cancelled() else None


def prompt_in(content: bytes | bytearray, model: str) -> SentPrompt | None:
    """Return the prompt of a body, or None if there is none that can be read. It may take milliseconds."""
    if len(content) > MOST_COMPARED_BYTES:
        return None
    try:
        body = msgspec.json.decode(content)
        return _prompt_of(body, model) if isinstance(body, Mapping) else None
    except UNREADABLE:
        return None


def _prompt_of(body: Mapping[str, Any], model: str) -> SentPrompt | None:
    texts = next((body[name] for name in ("messages", "input", "prompt", "text") if body.get(name)), None)
    if texts is None:
        return None
    messages = texts if isinstance(texts, list) else [texts]
    messages = [_plain(message) for message in messages]
    num_system = next((place for place, each in enumerate(messages) if not _is_system(each)), len(messages))
    first = [body[name] for name in ("instructions", "system") if body.get(name)]
    system = [*map(without_billing, map(_plain, first)), *messages[:num_system]]
    tools = body.get("tools")
    tools = [_plain(tool) for tool in tools] if isinstance(tools, list) else []
    outline = Outline(
        model,
        part_of(_encode(body.get("cache_salt"))),
        tuple(map(_part, tools)),
        tuple(map(_part, system)),
        {name: _part(body[name]) for name in _OPTIONS if body.get(name) is not None},
        tuple(map(_part, messages[num_system:])),
    )
    text = b",".join(map(_encode, [*tools, *system, *messages[num_system:]]))
    text += b" " * (-len(text) % BYTES_PER_TOKEN)
    pieces = np.frombuffer(text, np.uint32).tolist()
    return SentPrompt(outline, pieces, session_in(body.get("metadata")))


def compare(
    exchange: Exchange, sent: SentPrompt, told: Told, times: PassedTimes, recent: RecentPrompts, now_ns: int
) -> list[str]:
    """Compare a prompt that an engine has read with earlier ones, note the result in its account, and return it in
    words."""
    reuse = exchange.prompt_reuse
    reuse.outlines = [sent.outline]
    reuse.name_run(sent.session)
    num_pieces = max(1, len(sent.pieces))
    num_tokens = told.prompt_tokens or num_pieces
    scale = num_tokens / num_pieces
    cached = told.cached_tokens
    # If the engine reports no cached tokens, nothing counts as read again.
    num_cached = num_pieces if cached is None else min(num_pieces, round(cached / scale))
    done = PromptDone("", 0, sent.pieces, None, replace(times, scheduled=times.sent), num_cached)
    reuse.read(done, exchange.unique_id, exchange.request_id, exchange.client, recent, now_ns)
    found = reuse.by_prompt[0] = _scaled(reuse.by_prompt[0], scale)
    reuse.written_tokens = round(reuse.written_tokens * scale)
    return [] if told.prompt_tokens is None else [*_words(exchange, found, num_tokens, cached)]


def _words(exchange: Exchange, reuse: Reuse, num_tokens: int, cached: int | None) -> Iterable[str]:
    common = min(reuse.num_common, num_tokens)
    of_all = f"of {num_tokens:,} prompt tokens"
    if cached is None:
        if common >= LEAST_SHARE * num_tokens:
            yield (
                f"About {common:,} {of_all} are as {duration(reuse.age_ns)} before in {reuse.compared_with}. "
                "The engine does not say how many of them it had cached"
                f"{_REPORTS_CACHED.get(str(exchange.routing.get('engine_kind')), '')}."
            )
        return
    if reuse.reason is None or reuse.num_read_again < LEAST_SHARE * num_tokens:
        return
    if reuse.reason in _UNCHANGED:
        question = "is its prefix cache on?" if not cached else "is its prefix cache too small?"
        yield (
            f"About {common:,} {of_all} could have been cached, as {duration(reuse.age_ns)} before in "
            f"{reuse.compared_with}; the engine says {cached:,}: {question}"
        )
    else:
        said = f"About {reuse.num_read_again:,} {of_all} were read again: {why(exchange.reuse, reuse.reason)}."
        yield " ".join(filter(None, (said, HELPS.get(reuse.reason))))


def _scaled(reuse: Reuse, scale: float) -> Reuse:
    names = ("num_cached", "num_read_again", "num_new", "num_missed", "num_common")
    return replace(reuse, **{name: round(getattr(reuse, name) * scale) for name in names})


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in SYSTEM_ROLES


def _plain(value: Any) -> Any:
    """Return a message without marks of caches, which move in each turn, and with a size of its own for each medium."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    if value.get("type") in _MEDIA:
        digest = part_of(_encode(value)).digest.hex()
        return digest * (MEDIUM_BYTES // len(digest))
    return {name: _plain(each) for name, each in value.items() if name != "cache_control"}


def _part(value: Any) -> Part:
    return part_of(_encode(value), str(value.get("role", "")) if isinstance(value, Mapping) else "")
