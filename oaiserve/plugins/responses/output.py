"""The objects that /v1/responses sends, and `ResponseOutput`: the items of an answer as it grows, with their events.

It knows the API's items and events, and nothing of requests, of SSE, or of how tokens become parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.plugins.responses.cache_diagnostics import PromptCacheDiagnostics
from oaiserve.plugins.responses.items import encrypted
from oaiserve.plugins.responses.offered import OfferedTools, input_of
from oaiserve.routes.answer.common_shape import HOLE, Cost, call_id
from oaiserve.routes.answer.logprobs import ContentToken, chat_entries, chat_entries_in_parts
from oaiserve.routes.dialects.segments import Arguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, Segment
from oaiserve.routes.exchange import RequestTimings

NO_LOGPROBS = msgspec.Raw(b"[]")

Fillings = Sequence[Iterable[bytes]]
# Called with the type of an event, its fields, and the fillings of their holes.
Report = Callable[[str, dict[str, Any], Fillings], None]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text of the answer."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ContentToken] | msgspec.Raw = msgspec.field(default_factory=lambda: NO_LOGPROBS)


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A text of the model's reasoning."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the answer. `status` is in_progress, completed or incomplete."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The reasoning before an answer. There is no summary of it."""

    id: str
    status: str = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | UnsetType = UNSET  # the same text again, for clients that return only this field


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a function, for the client to make."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool, for the client to make."""

    id: str
    call_id: str
    name: str
    input: str = ""
    status: str = "in_progress"


class CompactionItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """A summary that replaces the conversation before it."""

    id: str
    encrypted_content: str


Item = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct):
    """The number of tokens from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """The number of tokens of the model's reasoning."""

    reasoning_tokens: int
    max_tokens_cut_to: int | UnsetType = UNSET  # the new limit, if the context had no room for the requested one


class ResponseUsage(msgspec.Struct):
    """The tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    oaiserve_cost: Cost | UnsetType = UNSET  # set if the header x-include-cost requests it


class IncompleteDetails(msgspec.Struct):
    """Why the answer was cut."""

    reason: str


class ResponseError(msgspec.Struct):
    """Why a response failed. The codes differ from those of HTTP errors."""

    code: str
    message: str
    request_id: str | UnsetType = UNSET
    trace_id: str | UnsetType = UNSET


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response: its state, its output, and the parameters as they took effect."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None
    status: str
    background: bool = False
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: Sequence[Item | CompactionItem]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    conversation: dict[str, str] | UnsetType = UNSET
    presence_penalty: float
    frequency_penalty: float
    reasoning: dict[str, Any]
    service_tier: str = "default"  # There is no other tier.
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    truncated_items: int | UnsetType = UNSET  # items from the beginning of the conversation that had no room
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET  # set if the client names one
    ignored_tools: list[str] | UnsetType = UNSET  # types of the tools that run on OpenAI's servers
    usage: ResponseUsage | None


class ResponseEvent(msgspec.Struct, omit_defaults=True):
    """An event of a stream. `type` says what happened, and which of the other fields are set."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item: Item | CompactionItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: list[ContentToken] | msgspec.Raw | UnsetType = UNSET
    timings: RequestTimings | UnsetType = UNSET


class ResponseOutput:
    """The items so far. At most one is open: the last one grows until another begins or the answer ends."""

    def __init__(
        self,
        response_id: str,
        num_logprobs: int | None,
        report: Report | None,
        offered: OfferedTools,
        *,
        encrypts: bool,
    ) -> None:
        """`report` is called for each event of a stream. Without it the answer is not streamed, and a broken call is
        taken back. Log-probabilities have `num_logprobs` alternatives; None: there are none. For a client that does not
        keep the text of reasoning, it `encrypts` this text."""
        self.items: list[Item] = []
        self._unique_id = response_id.removeprefix("resp_")
        self._num_logprobs = num_logprobs
        self._offered = offered
        self._encrypts = encrypts
        self._on_event = report
        self._is_open = False
        self._texts: list[str] = []  # texts of the open item
        self._logprobs: list[TokenLogprobs] = []  # logprobs of each message

    def add(self, segment: Segment, logprobs: TokenLogprobs) -> None:
        match segment:
            case Content(text):
                self._add_text(text, logprobs)
            case Reasoning(text):
                item = self._opened(ReasoningItem)
                self._texts.append(text)
                self._report("response.reasoning_text.delta", **self._place(item), content_index=0, delta=text)
            case CallBegin(name):
                self.close()
                own_id = call_id(self._unique_id, 0, len(self.items))
                namespace, inner = self._offered.namespaces.get(name, (UNSET, name))
                if name in self._offered.custom:
                    self._open(CustomCallItem(self._new_id("ctc"), own_id, name))
                else:
                    self._open(FunctionCallItem(self._new_id("fc"), own_id, inner, namespace=namespace))
            case Arguments(text) if isinstance(self.items[-1], CustomCallItem):
                self._texts.append(text)  # The input is sent, in JSON, when the call is complete.
            case Arguments(text):
                self._texts.append(text)
                self._report("response.function_call_arguments.delta", **self._place(self.items[-1]), delta=text)
            case CallBroken() if self._on_event is not None:  # The client has already received it.
                self.close("incomplete")
            case CallBroken(text):
                del self.items[-1]
                self._is_open = False
                self._add_text(text, logprobs)
            case CallEnd():
                self.close()

    def touch(self) -> bool:
        """Report a delta that adds nothing to the open item. Return False if none is open."""
        if not self._is_open:
            return False
        match item := self.items[-1]:
            case OutputMessage():
                self.add(Content(""), TokenLogprobs())
            case ReasoningItem():
                self.add(Reasoning(""), TokenLogprobs())
            case FunctionCallItem():
                self.add(Arguments(""), TokenLogprobs())
            case CustomCallItem():
                self._report("response.custom_tool_call_input.delta", **self._place(item), delta="")
        return True

    def end(self, logprobs: TokenLogprobs, *, is_cut: bool, has_text: bool) -> None:
        """Close the open item at the end of the answer. An answer that may have text always gets a message."""
        if has_text and not self.items:
            self._opened(OutputMessage)
        if self._is_open and isinstance(self.items[-1], OutputMessage):
            self._logprobs[-1].extend(logprobs)
        self.close("incomplete" if is_cut else "completed")

    def close(self, status: str = "completed") -> None:
        if not self._is_open:
            return
        item = self.items[-1]
        text = "".join(self._texts)
        item.status = status
        self._is_open = False
        place = self._place(item)
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            self._report("response.function_call_arguments.done", **place, name=item.name, arguments=text)
        elif isinstance(item, CustomCallItem):
            item.input = input_of(text)
            self._report("response.custom_tool_call_input.delta", **place, delta=item.input)
            self._report("response.custom_tool_call_input.done", **place, input=item.input)
        elif isinstance(item, ReasoningItem):
            (thought,) = item.content
            thought.text = text
            if self._encrypts:
                item.encrypted_content = encrypted(text)
            else:
                item.encrypted_content = UNSET
            self._report("response.reasoning_text.done", **place, content_index=0, text=text)
            self._report("response.content_part.done", **place, content_index=0, part=thought)
        else:
            (part,) = item.content
            part.text = text
            part.logprobs = NO_LOGPROBS if self._num_logprobs is None else HOLE
            done = {"text": text, "logprobs": part.logprobs}
            self._report("response.output_text.done", *self._filling(-1), **place, content_index=0, **done)
            self._report("response.content_part.done", *self._filling(-1), **place, content_index=0, part=part)
        fillings = self._filling(-1) if isinstance(item, OutputMessage) else []
        self._report("response.output_item.done", *fillings, output_index=place["output_index"], item=item)

    def stop(self) -> None:
        """Close the open item without an event: the answer has failed."""
        self._on_event = None
        self.close("incomplete")

    def fillings(self) -> Fillings:
        """Return the fillings for the holes of all closed items: the log-probabilities of each message."""
        return [filling for number in range(len(self._logprobs)) for filling in self._filling(number)]

    def _filling(self, message: int) -> list[Iterator[bytes]]:
        if self._num_logprobs is None:
            return []
        return [chat_entries_in_parts(self._logprobs[message], self._num_logprobs)]

    def _report(self, kind: str, *fillings: Iterable[bytes], **fields: Any) -> None:
        if self._on_event is not None:
            self._on_event(kind, fields, fillings)

    def _add_text(self, text: str, logprobs: TokenLogprobs) -> None:
        item = self._opened(OutputMessage)
        self._texts.append(text)
        if logprobs:
            self._logprobs[-1].extend(logprobs)
        if self._on_event is not None:
            if logprobs:
                entries = chat_entries(logprobs.entries(), self._num_logprobs or 0)
            else:
                entries = []
            fields = {**self._place(item), "content_index": 0, "delta": text, "logprobs": entries}
            self._on_event("response.output_text.delta", fields, ())

    def _opened(self, kind: type[OutputMessage] | type[ReasoningItem]) -> Item:
        if self._is_open and isinstance(self.items[-1], kind):
            return self.items[-1]
        self.close()
        if kind is OutputMessage:
            self._logprobs.append(TokenLogprobs())
            item: OutputMessage | ReasoningItem = OutputMessage(self._new_id("msg"))
            part: OutputText | ReasoningText = OutputText()
        else:
            item = ReasoningItem(self._new_id("rs"))
            part = ReasoningText()
        self._open(item)
        self._report("response.content_part.added", **self._place(item), content_index=0, part=part)
        item.content = [part]  # type: ignore[assignment]
        return item

    def _open(self, item: Item) -> None:
        self.items.append(item)
        self._is_open = True
        self._texts = []
        self._report("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": len(self.items) - 1}

    def _new_id(self, prefix: str) -> str:
        return item_id(prefix, self._unique_id, f"{len(self.items)}")


def item_id(prefix: str, unique_id: str, position: str) -> str:
    """Return the id of an item. It contains the response's id, so that references to the item can be followed."""
    return f"{prefix}_{unique_id}_{position}"


def response_ids(item_ids: Iterable[str]) -> set[str]:
    return {f"resp_{parts[1]}" for each in item_ids if len(parts := each.split("_")) == 3}
