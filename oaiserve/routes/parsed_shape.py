"""The shape of chat answers with calls of tools or reasoning apart from the content."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from oaiserve.engine.request import FinishReason, PromptDone, TokenChunk, Usage
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.routes.answer_reader import AnswerReader
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
)
from oaiserve.routes.conversation import Conversation
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, Segment
from oaiserve.routes.logprobs import drop_end_logprob
from oaiserve.routes.parameters import Wanted
from oaiserve.routes.shapes import CompletionTokensDetails, Head, TokenUsage, usage_object


class ParsedChatShape(ChatShape):
    """Renders answers whose text is parsed: each choice has a parser of its own."""

    no_content = None

    def __init__(
        self,
        kind: str,
        head: Head,
        wanted: Wanted,
        conversation: Conversation,
        counted_calls: dict[ToolCallOutcome, int],
        *,
        shows_reasoning: bool,
    ) -> None:
        """Read the calls and the reasoning of the conversation. The outcomes of calls are added to `counted_calls`."""
        super().__init__(kind, head, wanted)
        self._conversation = conversation
        self._tools = conversation.tools
        # The model can write nothing but calls then, so that text is a part of a call that was cut.
        self._is_forced = conversation.tools is not None and conversation.tools.is_forced
        self._shows_reasoning = shows_reasoning
        self._counted_calls = counted_calls
        self._readers: dict[int, AnswerReader] = {}  # by choice
        self._num_begun: dict[int, int] = {}  # by choice: calls of which the client of a stream knows
        self._messages: dict[int, ChatMessage] = {}  # of a whole answer, by choice

    def delta(self, chunk: TokenChunk) -> bytes:
        drop_end_logprob(chunk)
        self._usage.completion_tokens += len(chunk.token_ids)
        reader = self._reader(chunk.index)
        deltas = self._deltas(chunk.index, reader.read(chunk))
        if not deltas and (chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids)):
            deltas.append(ChatDelta())  # the text of these tokens is held back, or belongs to a mark
        events = b""
        for number, delta in enumerate(deltas):
            choice = ChatChunkChoice(chunk.index, delta) if number else self._delta_choice(chunk, delta)
            events += self._event(choice)
        if chunk.finish_reason is not None:
            reader.add_calls(self._counted_calls)
            end = self._end_choice(chunk)
            end.finish_reason = self._finish_reason(reader, chunk.finish_reason)
            events += self._event(end)
        return events

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        """Render the whole answer. All choices are read first, because the usage, which tells of all, comes before."""
        for chunk in choices:
            reader = self._reader(chunk.index)
            self._messages[chunk.index] = self._message(reader.read(chunk))
            reader.add_calls(self._counted_calls)
        return super().whole(prompts, choices, usage)

    def _message_choice(self, chunk: TokenChunk) -> ChatChoice:
        choice = super()._message_choice(chunk)
        choice.message = self._messages.pop(chunk.index)
        if chunk.finish_reason is not None:
            choice.finish_reason = self._finish_reason(self._reader(chunk.index), chunk.finish_reason)
        return choice

    def _usage_object(self, usage: Usage) -> TokenUsage:
        shown = usage_object(usage)
        if self._conversation.reads_reasoning:
            num_tokens = sum(reader.num_reasoning_tokens for reader in self._readers.values())
            shown.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return shown

    def _reader(self, index: int) -> AnswerReader:
        reader = self._readers.get(index)
        if reader is None:
            reader = self._readers[index] = self._conversation.reader()
        return reader

    def _deltas(self, index: int, segments: list[Segment]) -> list[ChatDelta]:
        """Return the deltas of a streamed message for segments of an answer."""
        deltas = []
        for segment in segments:
            if isinstance(segment, Content):
                if not self._is_forced:
                    deltas.append(ChatDelta(UNSET, segment.text))
            elif isinstance(segment, Reasoning):
                if self._shows_reasoning:
                    deltas.append(ChatDelta(reasoning=segment.text, reasoning_content=segment.text))
            elif isinstance(segment, Arguments):
                deltas.append(self._call_delta(index, FunctionDelta(UNSET, segment.text)))
            elif isinstance(segment, CallBegin):
                self._num_begun[index] = self._num_begun.get(index, 0) + 1
                deltas.append(self._call_delta(index, FunctionDelta(segment.name), is_first=True))
        return deltas

    def _call_delta(self, index: int, function: FunctionDelta, *, is_first: bool = False) -> ChatDelta:
        if self._tools is not None and self._tools.is_legacy:
            return ChatDelta(function_call=function)
        call = ToolCallDelta(index=self._num_begun[index] - 1, function=function)
        if is_first:
            call.id, call.type = _new_id(), "function"
        return ChatDelta(tool_calls=[call])

    def _message(self, segments: list[Segment]) -> ChatMessage:
        """Return the message of a whole answer. A call that broke is text in it."""
        content, reasoning = "", ""
        calls: list[Function] = []
        for segment in segments:
            match segment:
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

    def _finish_reason(self, reader: AnswerReader, reason: FinishReason) -> str:
        tools = self._tools
        if reason != FinishReason.STOP or tools is None or not reader.has_called:
            return reason
        if tools.choice == "named":  # as OpenAI has it
            return reason
        return "function_call" if tools.is_legacy else "tool_calls"


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
