"""The shape of the answers of /v1/messages: one message, or events with its blocks as they grow.

The input of a call is streamed as it is written. Clients run the calls of a message that stops with `tool_use`, and no
others. So a message with a call that was cut, or that a stream could not take back when it broke, never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.request import FinishReason, PromptDone, PromptProgress, TokenChunk, Usage
from oaiserve.plugins.messages.diagnostics import Diagnostics, diagnostics_of
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.common_shape import Cost, call_id, encode, told_cost, told_cut
from oaiserve.routes.answer.shape import Timings
from oaiserve.routes.chat.call_arguments import whole_members
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, Segment
from oaiserve.routes.exchange import AnswerFacts, RequestTimings
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


NO_INPUT = msgspec.Raw(b"{}")
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
    """Renders one answer. A stream has the same blocks as the whole answer, however its text is split, unless a call
    breaks after the stream has begun to send it."""

    activity_seconds = 100.0  # Claude Code adds the usage of each of these events to its totals, so they are few
    is_numbered = False

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        conversation: Conversation,
        facts: AnswerFacts,
        *,
        reuse: PromptReuse,
        max_tokens: int,
        shows_reasoning: bool,
        stream: bool,
    ) -> None:
        """`facts` about the answer are noted."""
        self._reuse = reuse
        self._head = head
        self._wanted = wanted
        self._reads_reasoning = conversation.reads_reasoning
        self._facts = facts
        self._max_tokens = max_tokens
        self._shows_reasoning = shows_reasoning
        self._streams = stream
        self._reader = conversation.reader()
        self._blocks: list[AnswerBlock] = []  # Texts stay empty in a stream.
        self._is_open = False  # The last block may still grow.
        self._is_forced = conversation.is_forced
        self._forced_name = None if conversation.tools is None else conversation.tools.forced_name
        self._arguments: list[str] = []  # arguments of the last call
        self._has_sent_broken = False  # A stream has sent the beginning of a call that broke.
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
        self._add_event("message_delta", delta=delta, usage=self._usage_so_far())
        return self._taken_events()

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        yield self._begin(Usage(len(event.token_ids), event.cached_tokens, 0))

    def _begin(self, usage: Usage) -> bytes:
        self._so_far = usage
        if not self._has_begun:
            self._add_event("message_start", message=self._message(self._usage_so_far(), []))
        self._has_begun = True
        return self._taken_events()

    def delta(self, chunk: TokenChunk) -> bytes:
        self._so_far.completion_tokens += len(chunk.token_ids)
        self._read(chunk)
        if self._is_in_call and not self._events:
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

    def _usage_so_far(self) -> MessageUsage:
        """Return the usage for an event before the end. As at Anthropic, it counts the first token from the start."""
        shown = self._usage(self._so_far)
        shown.output_tokens = max(shown.output_tokens, min(1, self._max_tokens))
        return shown

    def _usage(self, usage: Usage) -> MessageUsage:
        written = self._reuse.written_tokens
        computed = usage.prompt_tokens - usage.cached_tokens
        shown = MessageUsage(computed - written, usage.cached_tokens, usage.completion_tokens, written)
        if self._reads_reasoning or usage.max_tokens_cut_to is not None:
            shown.output_tokens_details = ThinkingTokens(self._reader.num_reasoning_tokens, told_cut(usage))
        shown.oaiserve_cost = told_cost(usage)
        return shown

    def _stop(self, usage: Usage) -> tuple[StopReason, str | None]:
        reason, sequence = self._reason(usage)
        self._facts.finish_reasons[0] = reason
        return reason, sequence

    def _reason(self, usage: Usage) -> tuple[StopReason, str | None]:
        end = self._end
        if end is not None and end.finish_reason == FinishReason.LENGTH:
            is_full = usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if self._reader.has_called and not self._has_sent_broken:
            return "tool_use", None
        is_loop = end is not None and end.finish_reason == FinishReason.REPETITION  # Anthropic has no word for it.
        if end is not None and isinstance(end.stop_reason, str) and not is_loop:
            return "stop_sequence", end.stop_reason
        return "end_turn", None

    def _read(self, chunk: TokenChunk) -> None:
        for segment in self._reader.read(chunk):
            self._add(segment)
        if chunk.finish_reason is not None:
            if chunk.finish_reason == FinishReason.LENGTH and self._max_tokens:
                self._end_before_name()
            self._close()
            self._reader.report(self._facts)
            self._end = chunk

    def _add(self, segment: Segment) -> None:
        match segment:
            case Content(text):
                if not self._is_forced:
                    self._add_text(text)
            case Reasoning(text):
                if self._shows_reasoning:
                    block = self._opened(AnswerThinking)
                    if self._streams:
                        self._add_delta(MessageDelta(type="thinking_delta", thinking=text))
                    else:
                        block.thinking += text
            case CallBegin(name):
                self._close()
                self._arguments = []
                call = AnswerToolUse(call_id(self._head.id, 0, len(self._blocks), "toolu_"), name, NO_INPUT)
                self._open(call)
            case Arguments(text):
                if self._streams:
                    self._add_delta(MessageDelta(type="input_json_delta", partial_json=text))
                else:
                    self._arguments.append(text)
            case CallBroken(text):
                self._break(text)
            case CallEnd():
                self._close()

    def _end_before_name(self) -> None:
        """Begin the only call that can be made if the answer was cut before its name."""
        has_called = any(isinstance(block, AnswerToolUse) for block in self._blocks)
        if self._forced_name is not None and not has_called and not self._reader.is_thinking:
            self._add(CallBegin(self._forced_name))

    def _break(self, text: str) -> None:
        """Turn the open call into text, or end its block if the client has it."""
        if self._streams:
            self._has_sent_broken = True
            self._close()
        else:
            self._blocks.pop()
            self._is_open = bool(self._blocks) and isinstance(self._blocks[-1], AnswerText)
            self._add_text(text)

    def _add_text(self, text: str) -> None:
        block = self._opened(AnswerText)
        if self._streams:
            self._add_delta(MessageDelta(type="text_delta", text=text))
        else:
            block.text += text

    @property
    def _is_in_call(self) -> bool:
        return self._is_open and isinstance(self._blocks[-1], AnswerToolUse)

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
            match self._blocks[-1]:
                case AnswerThinking():
                    self._add_delta(MessageDelta(type="signature_delta", signature=""))
                case AnswerToolUse() as call if not self._streams:
                    call.input = msgspec.Raw(whole_members("".join(self._arguments)).encode())
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
