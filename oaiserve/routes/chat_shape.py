"""The shape of the answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.request import PromptDone, TokenChunk, Usage
from oaiserve.routes.logprobs import chat_logprobs, chat_logprobs_in_parts, prompt_logprobs_in_parts
from oaiserve.routes.shapes import HOLE, ChoicesShape, encode, filled


class Function(msgspec.Struct):
    """A called function, or what a chunk adds to it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call, or what a chunk adds to it: then it has an index, and the id and the type only in its first chunk."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function


class ChatMessage(msgspec.Struct):
    """The message of a whole answer, or what a chunk adds to it. A field that is UNSET is left out."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    refusal: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same: clients know it by one name or the other
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET  # the older form of one call


class ChatChoice(msgspec.Struct):
    """A choice, which has a `message` in a whole answer and a `delta` in a chunk."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: dict[str, Any] | msgspec.Raw | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatShape(ChoicesShape):
    """Renders answers whose text is for the reader as it is."""

    no_content: str | None = ""  # what the first chunk of a choice has for its content

    def delta(self, chunk: TokenChunk) -> bytes:
        drop_end_logprob(chunk)
        return super().delta(chunk)

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        """Render the role of each choice, once and in the order of the choices, because the SDK concatenates what it
        gets."""
        self._usage.prompt_tokens += len(event.token_ids)
        choices = [
            ChatChoice(index, delta=ChatMessage("assistant", self.no_content)) for index in range(self._wanted.n)
        ]
        if self._wanted.with_token_ids:
            first, *choices = choices
            yield self._chunk_event((first,), prompt_token_ids=list(event.token_ids))
        yield from map(self._event, choices)

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        (prompt,), wanted = prompts, self._wanted
        more: dict[str, Any] = {}
        after: list[Iterable[bytes]] = []
        if wanted.num_prompt_logprobs is not None:
            more["prompt_logprobs"] = HOLE
            after.append(prompt_logprobs_in_parts(prompt.logprobs or TokenLogprobs(), wanted.num_prompt_logprobs))
        if wanted.with_token_ids:
            more["prompt_token_ids"] = list(prompt.token_ids)
        return self._whole(map(self._whole_choice, choices), usage, *after, **more)

    def _whole_choice(self, chunk: TokenChunk) -> Iterator[bytes]:
        drop_end_logprob(chunk)
        choice, wanted = self._message_choice(chunk), self._wanted
        if wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        if wanted.num_logprobs is None:
            return filled(encode(choice))
        choice.logprobs = HOLE
        logprobs = chunk.logprobs or TokenLogprobs()
        return filled(encode(choice), chat_logprobs_in_parts(logprobs, wanted.num_logprobs, wanted.as_token_ids))

    def _message_choice(self, chunk: TokenChunk) -> ChatChoice:
        """Return a choice of a whole answer, without what belongs to its tokens."""
        message = ChatMessage("assistant", chunk.text, None)
        return ChatChoice(chunk.index, message, UNSET, None, chunk.finish_reason, chunk.stop_reason)

    def _text_choice(self, chunk: TokenChunk) -> ChatChoice:
        return self._delta_choice(chunk, ChatMessage(UNSET, chunk.text))

    def _delta_choice(self, chunk: TokenChunk, delta: ChatMessage) -> ChatChoice:
        """Return what a choice has gained, with what belongs to the tokens of the chunk."""
        choice = ChatChoice(chunk.index, UNSET, delta)
        if chunk.logprobs and self._wanted.num_logprobs is not None:
            choice.logprobs = chat_logprobs(chunk.logprobs, self._wanted.num_logprobs, self._wanted.as_token_ids)
        if self._wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        return choice

    def _end_choice(self, chunk: TokenChunk) -> ChatChoice:
        return ChatChoice(chunk.index, UNSET, ChatMessage(), None, chunk.finish_reason, chunk.stop_reason)


def drop_end_logprob(chunk: TokenChunk) -> None:
    """Drop the log-probability of a token that only ended the choice: the tokens in `logprobs.content` are those of the
    content, as OpenAI has them. Completions keep it, because evaluations count one entry for each token."""
    if chunk.has_end_token and chunk.logprobs is not None:
        chunk.logprobs.truncate(len(chunk.token_ids) - 1)
