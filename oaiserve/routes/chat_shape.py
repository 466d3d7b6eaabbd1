"""The shape of the answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.request import PromptDone, TokenChunk, Usage
from oaiserve.routes.logprobs import (
    ChatLogprobs,
    chat_logprobs,
    chat_logprobs_in_parts,
    drop_end_logprob,
    prompt_logprobs_in_parts,
)
from oaiserve.routes.shapes import HOLE, ChoicesShape, StreamChunk, Whole, encode, filled


class Function(msgspec.Struct):
    """A called function, with its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: Function


class ChatMessage(msgspec.Struct):
    """The message of a whole answer. A field that is UNSET is left out."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET  # the same: clients know it by one name or the other
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: Function | UnsetType = UNSET  # the older form of one call


class FunctionDelta(msgspec.Struct):
    """A chunk adds this to a called function: its name comes first, and then parts of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A chunk adds this to the call with this index. The id and the type are in its first chunk."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct):
    """A chunk adds this to the message. A field that is UNSET is left out."""

    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    function_call: FunctionDelta | UnsetType = UNSET


class _ChoiceEnd(msgspec.Struct, kw_only=True):
    """Choices of whole answers and of chunks end with these fields."""

    logprobs: ChatLogprobs | msgspec.Raw | None = None
    finish_reason: Annotated[
        str | None, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", "function_call", None]})
    ] = None
    stop_reason: str | int | UnsetType | None = UNSET  # the stop string, or the id of the stop token
    token_ids: list[int] | UnsetType = UNSET


class ChatChoice(_ChoiceEnd):
    """A choice of a whole answer."""

    index: int
    message: ChatMessage


class ChatChunkChoice(_ChoiceEnd):
    """A chunk adds this to a choice."""

    index: int
    delta: ChatDelta


class ChatCompletion(Whole[ChatChoice]):
    """The answer to a chat."""


class ChatCompletionChunk(StreamChunk[ChatChunkChoice]):
    """An event of a streamed answer to a chat."""


class ChatShape(ChoicesShape):
    """Renders answers whose text is for the reader as it is."""

    no_content: str | None = ""  # the content in the first chunk of a choice

    def delta(self, chunk: TokenChunk) -> bytes:
        drop_end_logprob(chunk)
        return super().delta(chunk)

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        """Render the role of each choice once, in the order of the choices, because the SDK concatenates roles."""
        self._usage.prompt_tokens += len(event.token_ids)
        choices = [ChatChunkChoice(index, ChatDelta("assistant", self.no_content)) for index in range(self._wanted.n)]
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
        """Return a choice of a whole answer, without its log-probabilities and ids."""
        message = ChatMessage("assistant", chunk.text)
        return ChatChoice(chunk.index, message, finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason)

    def _text_choice(self, chunk: TokenChunk) -> ChatChunkChoice:
        return self._delta_choice(chunk, ChatDelta(UNSET, chunk.text))

    def _delta_choice(self, chunk: TokenChunk, delta: ChatDelta) -> ChatChunkChoice:
        """Return the delta of a choice, with the log-probabilities and ids of the chunk's tokens."""
        choice = ChatChunkChoice(chunk.index, delta)
        if chunk.logprobs and self._wanted.num_logprobs is not None:
            choice.logprobs = chat_logprobs(chunk.logprobs, self._wanted.num_logprobs, self._wanted.as_token_ids)
        if self._wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        return choice

    def _end_choice(self, chunk: TokenChunk) -> ChatChunkChoice:
        return ChatChunkChoice(
            chunk.index, ChatDelta(), finish_reason=chunk.finish_reason, stop_reason=chunk.stop_reason
        )
