"""The shapes of the answers of /v1/chat/completions: as the model writes them, or with calls and reasoning
separated."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.request import FinishReason, PromptDone, TokenChunk, Usage
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.routes.answer.common_shape import (
    HOLE,
    ChoicesShape,
    StreamChunk,
    TokenUsage,
    Whole,
    call_id,
    encode,
    filled,
    usage_object,
)
from oaiserve.routes.answer.logprobs import (
    ChatLogprobs,
    chat_logprobs_in_parts,
    drop_end_logprob,
    prompt_logprobs_in_parts,
)
from oaiserve.routes.chat.answer_reader import AnswerReader
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, Segment
from oaiserve.routes.exchange import AnswerFacts
from oaiserve.routes.intake.parameters import Wanted
from oaiserve.routes.intake.read import Head


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
    reasoning_content: str | UnsetType = UNSET  # the same text again: some clients read this name, some the other
    tool_calls: list[ToolCall] | UnsetType = UNSET


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


class _ChoiceEnd(msgspec.Struct, kw_only=True):
    """The last fields of the choices of whole answers and of chunks."""

    logprobs: ChatLogprobs | msgspec.Raw | None = None
    finish_reason: Annotated[
        str | None, msgspec.Meta(extra_json_schema={"enum": ["stop", "length", "tool_calls", "repetition", None]})
    ] = None
    stop_reason: str | int | UnsetType | None = UNSET  # see TokenChunk
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
    """Renders answers with calls and reasoning separated from the content. Each choice has its own reader."""

    empty_choice = ChatChunkChoice(index=0, delta=ChatDelta())

    def __init__(
        self,
        kind: str,
        head: Head,
        wanted: Wanted,
        conversation: Conversation,
        facts: AnswerFacts,
        *,
        shows_reasoning: bool,
    ) -> None:
        """Read the answer's calls and reasoning as `conversation` says, and note them in `facts`."""
        self._conversation = conversation
        self._tools = conversation.tools
        self._is_forced = conversation.is_forced
        # Whether an answer may have no content. Otherwise the content is a string from the first chunk on.
        self._is_parsed = conversation.reads_calls or conversation.reads_reasoning
        self._shows_reasoning = shows_reasoning
        self._facts = facts
        self._readers: defaultdict[int, AnswerReader] = defaultdict(conversation.reader)  # keyed by choice index
        self._num_begun: Counter[int] = Counter()  # calls that the client of a stream has seen, by choice
        self._messages: dict[int, ChatMessage] = {}  # messages of a whole answer, by choice
        super().__init__(kind, head, wanted)  # This renders a chunk with usage.

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        """Render the role of each choice once, in the order of the choices, because the SDK concatenates roles."""
        yield from self._computed(event)
        begin = ChatDelta("assistant", None if self._is_parsed else "")
        choices = [ChatChunkChoice(index, begin) for index in range(self._wanted.n)]
        if self._wanted.with_token_ids:
            first, *choices = choices
            yield self._chunk_event((first,), prompt_token_ids=list(event.token_ids))
        yield from map(self._event, choices)

    def delta(self, chunk: TokenChunk) -> bytes:
        drop_end_logprob(chunk)
        self._usage.completion_tokens += len(chunk.token_ids)
        reader = self._readers[chunk.index]
        deltas = self._deltas(chunk.index, reader.read(chunk))
        if not deltas and (chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids)):
            # The text of these tokens is held back, or is part of a tag.
            deltas.append(ChatDelta(UNSET, UNSET if self._is_parsed else ""))
        events = b""
        for number, delta in enumerate(deltas):
            choice = ChatChunkChoice(chunk.index, delta)
            if number == 0 and chunk.logprobs and self._wanted.num_logprobs is not None:
                logprobs = chat_logprobs_in_parts(chunk.logprobs, self._wanted.num_logprobs)
                choice.logprobs = msgspec.Raw(b"".join(logprobs))
            if number == 0 and self._wanted.with_token_ids:
                choice.token_ids = chunk.token_ids
            events += self._event(choice)
        if chunk.finish_reason is not None:
            # The end is a separate chunk, because clients drop the text of a chunk that has a finish reason.
            reason = self._end(reader, chunk.index, chunk.finish_reason)
            end = ChatChunkChoice(chunk.index, ChatDelta(), finish_reason=reason, stop_reason=chunk.stop_reason)
            events += self._event(end)
        return events

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        """Render the whole answer. All choices are read first, because the usage counts all of them and comes first."""
        for chunk in choices:
            reader = self._readers[chunk.index]
            self._messages[chunk.index] = self._message(chunk.index, reader.read(chunk))
            if chunk.finish_reason is not None:
                self._end(reader, chunk.index, chunk.finish_reason)
        (prompt,) = prompts
        wanted = self._wanted
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
        choice = ChatChoice(chunk.index, self._messages.pop(chunk.index))
        wanted = self._wanted
        choice.stop_reason = chunk.stop_reason
        choice.finish_reason = self._facts.finish_reasons.get(chunk.index)
        if wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        if wanted.num_logprobs is None:
            return filled(encode(choice))
        choice.logprobs = HOLE
        logprobs = chunk.logprobs or TokenLogprobs()
        return filled(encode(choice), chat_logprobs_in_parts(logprobs, wanted.num_logprobs))

    def _usage_object(self, usage: Usage) -> TokenUsage:
        if not self._conversation.reads_reasoning:
            return usage_object(usage)
        return usage_object(usage, sum(reader.num_reasoning_tokens for reader in self._readers.values()))

    def _deltas(self, index: int, segments: list[Segment]) -> list[ChatDelta]:
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
                self._num_begun[index] += 1
                deltas.append(self._call_delta(index, FunctionDelta(segment.name), is_first=True))
        return deltas

    def _call_delta(self, index: int, function: FunctionDelta, *, is_first: bool = False) -> ChatDelta:
        call = ToolCallDelta(index=self._num_begun[index] - 1, function=function)
        if is_first:
            call.id = call_id(self._first_values[0], index, call.index)
            call.type = "function"
        return ChatDelta(tool_calls=[call])

    def _message(self, index: int, segments: list[Segment]) -> ChatMessage:
        """Return the message of a whole answer. A broken call is text in it."""
        content = ""
        reasoning = ""
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
        if calls:
            message.tool_calls = [
                ToolCall(id=call_id(self._first_values[0], index, number), function=function)
                for number, function in enumerate(calls)
            ]
        return message

    def _end(self, reader: AnswerReader, index: int, reason: FinishReason) -> str:
        """Note the end of a choice, and return its finish reason in the API's terms."""
        reader.report(self._facts)
        self._facts.finish_reasons[index] = self._finish_reason(reader, reason)
        return self._facts.finish_reasons[index]

    def _finish_reason(self, reader: AnswerReader, reason: FinishReason) -> str:
        tools = self._tools
        if reason != FinishReason.STOP or tools is None or not reader.has_called:
            return reason
        if tools.choice == "named":  # matches OpenAI
            return reason
        return "tool_calls"
