"""The shape of the answers of /v1/messages: one message, or events with its blocks as they grow.

A call is sent in one piece when it is complete. Clients run any part of a call that they get, so they must never get a
part of a broken or cut call. Such a call is text, and a stream sends it as a whole answer would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.request import FinishReason, PromptDone, PromptProgress, TokenChunk, Usage
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.plugins.messages.diagnostics import Diagnostics, diagnostics_of
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.common_shape import Cost, call_id, encode, told_cost, told_cut
from oaiserve.routes.answer.shape import Timings
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, Segment
from oaiserve.routes.exchange import RequestTimings
from oaiserve.routes.intake.parameters import Wanted
from oaiserve.routes.intake.read import Head
from oaiserve.routes.prompt_reuse import PromptReuse


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """A text of the answer."""

    text: str = ""


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """The model's reasoning. Nothing is signed here."""

    thinking: str = ""
    signature: str = ""


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool, for the client to make."""

    id: str
    name: str
    input: dict[str, Any] | msgspec.Raw


AnswerBlock = AnswerText | AnswerThinking | AnswerToolUse
StopReason = Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]


class ThinkingTokens(msgspec.Struct):
    """The number of tokens in the answer that are reasoning."""

    thinking_tokens: int
    max_tokens_cut_to: int | UnsetType = UNSET  # the new limit, if the context had no room for the requested one


class MessageUsage(msgspec.Struct):
    """The tokens of a message. Prompt tokens from the prefix cache are counted separately."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET
    oaiserve_cost: Cost | UnsetType = UNSET  # set if the header x-include-cost requests it


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The answer to a conversation."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
    diagnostics: Diagnostics | None = None


class MessageDelta(msgspec.Struct, kw_only=True):
    """The change that an event makes to its block, or to the message. A field that is UNSET is left out."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, kw_only=True):
    """An event of a stream. `type` says what happened, and which of the other fields are set."""

    type: str
    message: AnswerMessage | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: AnswerBlock | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class MessagesShape:
    """Renders one answer. A stream has the same blocks as the whole answer, however its text is split."""

    activity_seconds = 100.0  # Claude Code adds the usage of each of these events to its totals, so they are few
    is_numbered = False

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        conversation: Conversation,
        counted_calls: dict[ToolCallOutcome, int],
        *,
        reuse: PromptReuse,
        max_tokens: int,
        shows_reasoning: bool,
        stream: bool,
    ) -> None:
        """The outcomes of calls are added to `counted_calls`."""
        self._reuse = reuse
        self._head = head
        self._wanted = wanted
        self._reads_reasoning = conversation.reads_reasoning
        self._counted_calls = counted_calls
        self._max_tokens = max_tokens
        self._shows_reasoning = shows_reasoning
        self._streams = stream
        self._reader = conversation.reader(breaks_cut_calls=True)
        self._blocks: list[AnswerBlock] = []  # in a stream, texts stay empty
        self._is_open = False  # whether the last block may grow
        self._called = ""  # the tool of the call that is being written
        self._arguments: list[str] = []  # arguments of that call
        self._end: TokenChunk | None = None
        self._so_far = Usage(0, 0, 0)
        self._has_begun = False
        self._events: list[bytes] = []  # events that were not returned yet

    def begun(self, event: PromptProgress) -> bytes:
        return self._begin(Usage(event.num_tokens, event.num_cached, 0))

    def progress(self, _event: PromptProgress) -> bytes:
        self._add_event("ping")
        return self._taken_events()

    def activity(self) -> bytes:
        delta = MessageDelta(stop_reason=None, stop_sequence=None)
        self._add_event("message_delta", delta=delta, usage=self._usage(self._so_far))
        return self._taken_events()

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        yield self._begin(Usage(len(event.token_ids), event.cached_tokens, 0))

    def _begin(self, usage: Usage) -> bytes:
        if not self._has_begun:
            self._add_event("message_start", message=self._message(self._usage(usage), []))
        self._has_begun = True
        self._so_far = usage
        return self._taken_events()

    def delta(self, chunk: TokenChunk) -> bytes:
        self._so_far.completion_tokens += len(chunk.token_ids)
        self._read(chunk)
        if self._called and not self._events:
            self._add_event("ping")  # a sign of life while a call is written
        return self._taken_events()

    def finished(self, usage: Usage, timings: Timings) -> Iterator[bytes]:
        reason, sequence = self._stop(usage)
        if self._wanted.include_timings:
            more = {"timings": timings(usage)}
        else:
            more = {}
        delta = MessageDelta(stop_reason=reason, stop_sequence=sequence)
        self._add_event("message_delta", delta=delta, usage=self._usage(usage), **more)
        self._add_event("message_stop")
        yield self._taken_events()

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return sse.event(encode(error), "error")

    def whole(self, _prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        (chunk,) = choices
        self._read(chunk)
        message = self._message(self._usage(usage), self._blocks)
        message.stop_reason, message.stop_sequence = self._stop(usage)
        yield encode(message)

    def _message(self, usage: MessageUsage, blocks: list[AnswerBlock]) -> AnswerMessage:
        return AnswerMessage(
            id=self._head.id,
            model=self._head.model,
            content=blocks,
            usage=usage,
            diagnostics=diagnostics_of(self._reuse),
        )

    def _usage(self, usage: Usage) -> MessageUsage:
        written = self._reuse.written_tokens
        computed = usage.prompt_tokens - usage.cached_tokens
        shown = MessageUsage(computed - written, usage.cached_tokens, usage.completion_tokens, written)
        if self._reads_reasoning or usage.max_tokens_cut_to is not None:
            shown.output_tokens_details = ThinkingTokens(self._reader.num_reasoning_tokens, told_cut(usage))
        shown.oaiserve_cost = told_cost(usage)
        return shown

    def _stop(self, usage: Usage) -> tuple[StopReason, str | None]:
        end = self._end
        if end is not None and end.finish_reason == FinishReason.LENGTH:
            is_full = usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if self._reader.has_called:
            return "tool_use", None
        if end is not None and isinstance(end.stop_reason, str):
            return "stop_sequence", end.stop_reason
        return "end_turn", None

    def _read(self, chunk: TokenChunk) -> None:
        for segment in self._reader.read(chunk):
            self._add(segment)
        if chunk.finish_reason is not None:
            self._close()
            self._reader.add_calls(self._counted_calls)
            self._end = chunk

    def _add(self, segment: Segment) -> None:
        match segment:
            case Content(text):
                self._add_text(text)
            case Reasoning(text):
                if self._shows_reasoning:
                    block = self._opened(AnswerThinking)
                    if self._streams:
                        self._add_delta(MessageDelta(type="thinking_delta", thinking=text))
                    else:
                        block.thinking += text
            case CallBegin(name):
                self._called = name
                self._arguments = []
            case Arguments(text):
                self._arguments.append(text)
            case CallBroken(text):
                self._called = ""
                self._add_text(text)
            case CallEnd():
                self._add_call("".join(self._arguments))

    def _add_text(self, text: str) -> None:
        block = self._opened(AnswerText)
        if self._streams:
            self._add_delta(MessageDelta(type="text_delta", text=text))
        else:
            block.text += text

    def _add_call(self, arguments: str) -> None:
        self._close()
        raw = msgspec.Raw(b"{}" if self._streams else arguments.encode())
        self._open(AnswerToolUse(call_id(self._head.id, 0, len(self._blocks), "toolu_"), self._called, raw))
        if self._streams:
            self._add_delta(MessageDelta(type="input_json_delta", partial_json=arguments))
        self._close()
        self._called = ""

    def _opened(self, kind: type[Any]) -> Any:
        if not (self._is_open and isinstance(self._blocks[-1], kind)):
            self._close()
            self._open(kind())
        return self._blocks[-1]

    def _open(self, block: AnswerBlock) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._add_event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> None:
        if self._is_open:
            if isinstance(self._blocks[-1], AnswerThinking):
                self._add_delta(MessageDelta(type="signature_delta", signature=""))
            self._add_event("content_block_stop", index=len(self._blocks) - 1)
            self._is_open = False

    def _add_delta(self, delta: MessageDelta) -> None:
        self._add_event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _add_event(self, kind: str, **fields: Any) -> None:
        if self._streams:
            self._events.append(sse.event(encode(MessageEvent(type=kind, **fields)), kind))

    def _taken_events(self) -> bytes:
        taken = b"".join(self._events)
        self._events = []
        return taken
