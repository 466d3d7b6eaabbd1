"""The shape of chat answers in which calls of tools, or reasoning, are told apart from the text for the reader."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from oaiserve.engine.request import FinishReason, PromptDone, TokenChunk, Usage
from oaiserve.record import ToolCallOutcome
from oaiserve.routes.chat_shape import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatShape,
    Function,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    drop_end_logprob,
)
from oaiserve.routes.parse.answer import AnswerParser
from oaiserve.routes.parse.families import CallFamily
from oaiserve.routes.parse.parts import Arguments, CallBegin, CallBroken, CallEnd, Content, Part, Reasoning, joined
from oaiserve.routes.parse.reasoning import ReasoningMode
from oaiserve.routes.protocol import Wanted
from oaiserve.routes.shapes import CompletionTokensDetails, Head, TokenUsage, usage_object
from oaiserve.routes.tools import Tools


class ParsedChatShape(ChatShape):
    """Renders answers whose text is parsed: each choice has a parser of its own."""

    no_content = None

    def __init__(
        self,
        kind: str,
        head: Head,
        wanted: Wanted,
        *,
        family: CallFamily | None,
        tools: Tools | None,
        reasoning: ReasoningMode | None,
        shows_reasoning: bool,
        counted_calls: dict[ToolCallOutcome, int],
    ) -> None:
        """Read calls of `tools`, if there are any, and `reasoning`. The outcomes of calls are added to
        `counted_calls`."""
        super().__init__(kind, head, wanted)
        # The model can write nothing but calls then, so that text is a part of a call that was cut.
        self._is_forced = tools is not None and tools.is_forced
        self._family = family
        self._tools = tools
        self._reasoning = reasoning
        self._shows_reasoning = shows_reasoning
        self._counted_calls = counted_calls
        self._readers: dict[int, _Reader] = {}  # by choice
        self._messages: dict[int, ChatMessage] = {}  # of a whole answer, by choice

    def delta(self, chunk: TokenChunk) -> bytes:
        drop_end_logprob(chunk)
        self._usage.completion_tokens += len(chunk.token_ids)
        reader = self._reader(chunk.index)
        deltas = self._deltas(reader, reader.read(chunk))
        if not deltas and (chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids)):
            deltas.append(ChatDelta())  # the text of these tokens is held back, or belongs to a mark
        events = b""
        for number, delta in enumerate(deltas):
            choice = ChatChunkChoice(chunk.index, delta) if number else self._delta_choice(chunk, delta)
            events += self._event(choice)
        if chunk.finish_reason is not None:
            self._note_calls(reader)
            end = self._end_choice(chunk)
            end.finish_reason = self._finish_reason(reader, chunk.finish_reason)
            events += self._event(end)
        return events

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        """Render the whole answer. All choices are read first, because the usage, which tells of all, comes before."""
        for chunk in choices:
            reader = self._reader(chunk.index)
            self._messages[chunk.index] = self._message(reader.read(chunk))
            self._note_calls(reader)
        return super().whole(prompts, choices, usage)

    def _message_choice(self, chunk: TokenChunk) -> ChatChoice:
        choice = super()._message_choice(chunk)
        choice.message = self._messages.pop(chunk.index)
        if chunk.finish_reason is not None:
            choice.finish_reason = self._finish_reason(self._reader(chunk.index), chunk.finish_reason)
        return choice

    def _usage_object(self, usage: Usage) -> TokenUsage:
        shown = usage_object(usage)
        if self._reasoning is not None:
            num_tokens = sum(reader.num_reasoning_tokens for reader in self._readers.values())
            shown.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return shown

    def _reader(self, index: int) -> _Reader:
        reader = self._readers.get(index)
        if reader is None:
            tools, family = self._tools, self._family
            thinking = None if self._reasoning is None else self._reasoning.parser()
            calls = None
            if tools is not None and family is not None:
                calls = family.parser(tools.schemas, only_one=tools.only_one)
            reader = self._readers[index] = _Reader(AnswerParser(thinking, calls))
        return reader

    def _deltas(self, reader: _Reader, parts: list[Part]) -> list[ChatDelta]:
        """Return what the parts add to a streamed message."""
        deltas = []
        for part in parts:
            if isinstance(part, Content):
                if not self._is_forced:
                    deltas.append(ChatDelta(UNSET, part.text))
            elif isinstance(part, Reasoning):
                if self._shows_reasoning:
                    deltas.append(ChatDelta(reasoning=part.text, reasoning_content=part.text))
            elif isinstance(part, Arguments):
                deltas.append(self._call_delta(reader, FunctionDelta(UNSET, part.text)))
            elif isinstance(part, CallBegin):
                reader.num_begun += 1
                deltas.append(self._call_delta(reader, FunctionDelta(part.name), is_first=True))
        return deltas

    def _call_delta(self, reader: _Reader, function: FunctionDelta, *, is_first: bool = False) -> ChatDelta:
        if self._tools is not None and self._tools.is_legacy:
            return ChatDelta(function_call=function)
        call = ToolCallDelta(index=reader.num_begun - 1, function=function)
        if is_first:
            call.id, call.type = _new_id(), "function"
        return ChatDelta(tool_calls=[call])

    def _message(self, parts: list[Part]) -> ChatMessage:
        """Return the message of a whole answer. A call that broke is text in it."""
        content, reasoning = "", ""
        calls: list[Function] = []
        for part in parts:
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegin(name):
                    calls.append(Function(name, ""))
                case Arguments(text):
                    calls[-1].arguments += text
                case CallBroken(text):
                    calls.pop()
                    content += text
                case CallEnd():
                    pass
        if self._is_forced:
            content = ""
        message = ChatMessage("assistant", content)
        if not content and (calls or reasoning or self._is_forced):
            message.content = None
        if reasoning and self._shows_reasoning:
            message.reasoning = message.reasoning_content = reasoning
        if calls and self._tools is not None and self._tools.is_legacy:
            message.function_call = calls[0]
        elif calls:
            message.tool_calls = [ToolCall(id=_new_id(), function=function) for function in calls]
        return message

    def _finish_reason(self, reader: _Reader, reason: FinishReason) -> str:
        tools, calls = self._tools, reader.parser.calls
        if reason != FinishReason.STOP or tools is None or calls is None or not calls.num_called:
            return reason
        if tools.choice == "named":  # as OpenAI has it
            return reason
        return "function_call" if tools.is_legacy else "tool_calls"

    def _note_calls(self, reader: _Reader) -> None:
        if (calls := reader.parser.calls) is None:
            return
        for outcome, number in (
            (ToolCallOutcome.CALLED, calls.num_called),
            (ToolCallOutcome.UNPARSED, calls.num_unparsed),
        ):
            if number:
                self._counted_calls[outcome] = self._counted_calls.get(outcome, 0) + number


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


@dataclass(slots=True)
class _Reader:
    """Reads the text of one choice, and counts the tokens of its reasoning."""

    parser: AnswerParser
    num_begun: int = 0  # calls of which the client knows
    num_reasoning_tokens: int = 0
    _text_length: int = 0  # of the tokens so far
    _lengths: list[int] = field(default_factory=list)  # of the tokens of which it is not known yet

    def read(self, chunk: TokenChunk) -> list[Part]:
        parts = self.parser.push(chunk.text)
        if chunk.finish_reason is not None:
            is_cut = chunk.finish_reason == FinishReason.LENGTH or chunk.stop_reason is not None
            parts += self.parser.finish(is_cut=is_cut)
        if chunk.text_lengths is not None:
            self._count(chunk.text_lengths)
        return joined(parts) if len(parts) > 1 else parts

    def _count(self, text_lengths: list[int]) -> None:
        """Count the tokens whose text begins within the reasoning."""
        thinking = self.parser.thinking
        if thinking is None or (thinking.is_over and not self._lengths and self._text_length >= thinking.end):
            return
        self._lengths += text_lengths
        counted = 0
        for length in self._lengths:
            if self._text_length >= thinking.end:
                break
            self._text_length += length
            counted += 1
        self.num_reasoning_tokens += counted
        del self._lengths[:counted]
        if thinking.is_over:
            self._lengths.clear()
