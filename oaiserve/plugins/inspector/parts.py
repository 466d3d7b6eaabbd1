"""Finds the origin of each token of a prompt: the chat template, the tools, a message, or an image.

The prompt is rendered again when it is viewed, so serving costs nothing extra. If the tokens then differ from those
that the model read, for example because the template inserts the time, the origins are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from oaiserve.engine.request import ChatPrompt, TextPrompt
from oaiserve.errors import APIError
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.inspector.changes import num_same_at_ends

TEMPLATE = "template"
TOOLS = "tools"
MEDIA = "media"
TEXT = "text"  # text that neither the template nor a known message contains


class Span(NamedTuple):
    """A part of a rendered text."""

    start: int
    end: int
    kind: str  # TOOLS, TEXT or the role of a message


class Runs(NamedTuple):
    """A run of consecutive tokens of the same kind in a prompt."""

    kind: str
    num_tokens: int


def kinds_of(tokenizer: Any, prompt: ChatPrompt, token_ids: Sequence[int]) -> Work[list[Runs] | None]:
    """Return the kinds of a prompt's tokens as runs, or None if they are unknown. Yields between pieces of work."""
    try:
        text, outside = tokenizer.rendered(prompt)
        yield None
        rendered_ids = yield from tokenizer.encode_in_pieces(prompt)
    except APIError:
        return None
    yield None
    as_text = TextPrompt(text, prompt.add_special_tokens)
    parts = [*tokenizer.text_parts(as_text, rendered_ids)]
    if "".join(parts) != text:
        return None
    yield None
    kinds = [*_kinds(parts, [*_spans(tokenizer, prompt, text, outside)])]
    placed = _placed(rendered_ids, kinds, token_ids)
    if placed is None:
        return None
    return [Runs(kind, sum(1 for _ in same)) for kind, same in groupby(placed)]


def _spans(tokenizer: Any, prompt: ChatPrompt, text: str, outside: list[tuple[int, int]]) -> Iterator[Span]:
    """Yield the parts that the template did not write, in order."""
    first, last = _of_tools(tokenizer, prompt, text)
    messages = _messages_in(prompt.messages, text)
    role = TEXT
    for start, end in outside:
        while messages and messages[0][0] < end:  # messages that begin before the end of this part
            role = messages.pop(0)[1]
        tools_start = max(start, min(first, end))
        tools_end = max(tools_start, min(last, end))
        yield Span(start, tools_start, role)
        yield Span(tools_start, tools_end, TOOLS)
        yield Span(tools_end, end, role)


def _of_tools(tokenizer: Any, prompt: ChatPrompt, text: str) -> tuple[int, int]:
    """Return the start and end of the part of the text that describes the tools."""
    if prompt.told_tools:  # A message describes them, with one line for each.
        lines = [msgspec.json.encode(tool["function"]).decode() for tool in prompt.told_tools]
        start = max(0, text.find(lines[0]))
        return start, max(start, text.find(lines[-1]) + len(lines[-1]))
    if not prompt.tools:
        return 0, 0
    try:
        without, _ = tokenizer.rendered(replace(prompt, tools=()))
    except APIError:  # The template can't render earlier tool calls without the tools.
        return 0, 0
    start, num_same_end = num_same_at_ends(text, without)
    return start, len(text) - num_same_end


def _messages_in(messages: Sequence[Any], text: str) -> list[tuple[int, str]]:
    """Return where each message's texts begin in the rendered text, with its role. Skips texts that aren't found."""
    found: list[tuple[int, str]] = []
    at = 0
    for message in messages:
        for words in _words(message):
            start = text.find(words, at)
            if start >= 0:
                found.append((start, str(message.get("role", TEXT))))
                at = start + len(words)
    return found


def _words(message: Any) -> Iterator[str]:
    """Yield the texts of a message in the order in which templates write them."""
    texts: list[Any] = [message.get("reasoning_content")]
    content = message.get("content")
    if isinstance(content, str):
        texts.append(content)
    elif isinstance(content, list | tuple):
        texts += [part.get("text") for part in content]
    texts += [call.get("function", {}).get("name") for call in message.get("tool_calls") or ()]
    for each in texts:
        if isinstance(each, str) and each.strip():
            yield each.strip()


def _kinds(parts: Sequence[str], spans: list[Span]) -> Iterator[str]:
    """Yield the kind of each token, given the texts of the tokens. It is the kind of the token's first character that
    the template did not write."""
    at = 0
    place = 0
    for part in parts:
        end = at + len(part)
        while place < len(spans) and spans[place].end <= at:
            place += 1
        is_outside = place < len(spans) and spans[place].start < end
        yield spans[place].kind if is_outside else TEMPLATE
        at = end


def _placed(rendered_ids: Sequence[int], kinds: Sequence[str], token_ids: Sequence[int]) -> list[str] | None:
    """Return the kinds of a prompt's tokens, or None if these differ from the rendered ones. The tokens of images are
    missing from the rendered text."""
    placed: list[str] = []
    at = 0
    for number, token_id in enumerate(token_ids):
        if at < len(rendered_ids) and token_id == rendered_ids[at]:
            placed.append(kinds[at])
            at += 1
        else:
            if placed and token_ids[number - 1] == token_id:  # the template's own placeholder
                placed[-1] = MEDIA
            placed.append(MEDIA)
    return placed if at == len(rendered_ids) else None
