"""The shape of the answers of /v1/responses: named events with sequence numbers, or one object."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import FinishReason, PromptDone, PromptProgress, TokenChunk, Usage
from oaiserve.engine.types.logprobs import TokenLogprobs
from oaiserve.errors import ClientError
from oaiserve.plugins.responses.cache_diagnostics import diagnostics_of
from oaiserve.plugins.responses.offered import OfferedTools
from oaiserve.plugins.responses.output import (
    CompactionItem,
    Fillings,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseObject,
    ResponseOutput,
    ResponseUsage,
)
from oaiserve.routes.answer import sse
from oaiserve.routes.answer.common_shape import encode, filled, progress_comment, told_cost, told_cut
from oaiserve.routes.answer.logprobs import drop_end_logprob
from oaiserve.routes.answer.shape import ACTIVITY_SECONDS, Timings
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.dialects.segments import Content
from oaiserve.routes.exchange import AnswerFacts
from oaiserve.routes.intake.parameters import Wanted
from oaiserve.routes.intake.read import Head
from oaiserve.routes.prompt_reuse import PromptReuse


class ResponsesShape:
    """Renders one answer. Whole or streamed, its last object is the same, and is stored."""

    activity_seconds = ACTIVITY_SECONDS
    is_numbered = True

    def __init__(
        self,
        head: Head,
        wanted: Wanted,
        conversation: Conversation,
        facts: AnswerFacts,
        reported: Mapping[str, Any],
        offered: OfferedTools,
        *,
        unix_ns: Callable[[], int],
        reuse: PromptReuse,
        is_compacted: bool,
        stream: bool,
        encrypts: bool,
        only_prepares: bool = False,
    ) -> None:
        """`reported` are the parameters to repeat in the answer. `facts` about it are noted. An answer that
        `only_prepares` the cache has no output."""
        self._head = head
        self._unix_ns = unix_ns
        self._reuse = reuse
        self._is_compacted = is_compacted
        self._only_prepares = only_prepares
        self._wanted = wanted
        self._facts = facts
        self._reported = reported
        self._reader = conversation.reader()
        self._is_forced = conversation.is_forced
        self._is_parsed = conversation.reads_calls or conversation.reads_reasoning
        report = self._add_event if stream else None
        self._output = ResponseOutput(head.id, wanted.num_logprobs, report, offered, encrypts=encrypts)
        self._items: Sequence[Item | CompactionItem] = self._output.items
        self._events: list[bytes] = []  # events that were not returned yet
        self._num_events = 0
        self._has_begun = False
        self._held = TokenLogprobs()  # logprobs of tokens whose item is not known yet
        self._is_cut = False
        self._is_loop = False  # A loop has cut it.
        self._final: ResponseObject | None = None

    def queued(self) -> bytes:
        self._add_event("response.created", {"response": self._object("queued")})
        self._add_event("response.queued", {"response": self._object("queued")})
        return self._taken_events()

    def begun(self, _event: PromptProgress | PromptDone | None = None) -> bytes:
        if not self._has_begun:
            if self._num_events == 0:
                self._add_event("response.created", {"response": self._object("in_progress")})
            self._add_event("response.in_progress", {"response": self._object("in_progress")})
        self._has_begun = True
        return self._taken_events()

    def progress(self, event: PromptProgress) -> bytes:
        return progress_comment(event)

    def activity(self) -> bytes:
        begun = self.begun()
        if not self._output.touch():
            fields = {"response": self._object("in_progress")}
            self._add_event("response.in_progress", fields, self._output.fillings())
        return begun + self._taken_events()

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        yield self.begun(event)

    def delta(self, chunk: TokenChunk) -> bytes:
        self._read(chunk)
        return self._taken_events()

    def finished(self, usage: Usage, timings: Timings) -> Iterator[bytes]:
        final = self.final(usage)
        if self._wanted.include_timings:
            more = {"timings": timings(usage)}
        else:
            more = {}
        fields = {"response": final, **more}
        self._add_event(f"response.{final.status}", fields, self._output.fillings())
        yield self._taken_events() + sse.DONE

    def failed(self, error: Mapping[str, Any]) -> bytes:
        self._output.stop()
        details = error["error"]
        if details["code"] == "rate_limit_exceeded":
            code = "rate_limit_exceeded"
        elif details["type"] == ClientError.type:
            code = "invalid_prompt"
        else:
            code = "server_error"
        ids = {key: details[key] for key in ("request_id", "trace_id") if key in details}
        fields = {"response": self._object("failed", error=ResponseError(code, details["message"], **ids))}
        self._add_event("response.failed", fields, self._output.fillings())
        return self._taken_events() + sse.DONE

    def cancelled(self) -> bytes:
        self._output.stop()
        return _without_logprobs(self._object("cancelled"))

    def whole(self, _prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        (chunk,) = choices
        self._read(chunk)
        return filled(encode(self.final(usage)), *self._output.fillings())

    def final(self, usage: Usage) -> ResponseObject:
        """Return the complete response, with holes for its log-probabilities."""
        if self._final is None:
            status = "incomplete" if self._is_cut else "completed"
            self._final = self._object(status, usage=self._usage_object(usage))
        return self._final

    def stored(self, usage: Usage) -> bytes:
        """Return the response as it is stored: without its log-probabilities, which would take most of the space."""
        return _without_logprobs(self.final(usage))

    def _read(self, chunk: TokenChunk) -> None:
        drop_end_logprob(chunk)
        pieces = _single_tokens(chunk) if self._is_parsed and chunk.logprobs is not None else (chunk,)
        for piece in pieces:
            parts = self._reader.read(piece)
            if piece.logprobs is not None:
                self._held.extend(piece.logprobs)
            for part in parts:
                if not (self._is_forced and isinstance(part, Content)):
                    self._output.add(part, self._held)
                if self._held:
                    self._held = TokenLogprobs()
        if chunk.finish_reason is not None:
            self._is_cut = chunk.finish_reason != FinishReason.STOP and not self._only_prepares
            self._is_loop = chunk.finish_reason == FinishReason.REPETITION
            self._reader.report(self._facts)
            if self._reader.has_called and not self._is_cut:
                self._facts.finish_reasons[chunk.index] = "tool_calls"  # The route has no word for it.
            self._output.end(self._held, is_cut=self._is_cut, has_text=not (self._is_forced or self._only_prepares))

    def _add_event(self, kind: str, fields: Mapping[str, Any], fillings: Fillings = ()) -> None:
        data = encode(ResponseEvent(kind, self._num_events, **fields))
        self._num_events += 1
        self._events.append(sse.event(b"".join(filled(data, *fillings)) if fillings else data, kind))

    def _taken_events(self) -> bytes:
        taken = b"".join(self._events)
        self._events = []
        return taken

    def _usage_object(self, usage: Usage) -> ResponseUsage:
        return ResponseUsage(
            usage.prompt_tokens,
            InputTokensDetails(usage.cached_tokens, self._reuse.written_tokens),
            usage.completion_tokens,
            OutputTokensDetails(self._reader.num_reasoning_tokens, told_cut(usage)),
            usage.prompt_tokens + usage.completion_tokens,
            told_cost(usage),
        )

    @property
    def _cut_by(self) -> str:
        return FinishReason.REPETITION if self._is_loop else "max_output_tokens"

    def _object(
        self, status: str, *, usage: ResponseUsage | None = None, error: ResponseError | None = None
    ) -> ResponseObject:
        return ResponseObject(
            id=self._head.id,
            created_at=self._head.created,
            completed_at=self._unix_ns() // 10**9 if status == "completed" else None,
            status=status,
            error=error,
            incomplete_details=IncompleteDetails(self._cut_by) if status == "incomplete" else None,
            model=self._head.model,
            output=self._items,
            **self._reported,
            prompt_cache_diagnostics=diagnostics_of(self._reuse, is_compacted=self._is_compacted),
            usage=usage,
        )


def _without_logprobs(response: ResponseObject) -> bytes:
    return encode(response).replace(b"\0", b"[]")


def _single_tokens(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Yield a chunk with log-probabilities token by token, so that each of them stays with its segment."""
    assert chunk.logprobs is not None
    assert chunk.text_lengths is not None
    if not chunk.token_ids:
        yield chunk
    rows = chunk.logprobs.entries()
    start = 0
    for number, token_id in enumerate(chunk.token_ids, start=1):
        is_last = number == len(chunk.token_ids)
        length = chunk.text_lengths[number - 1]
        end = len(chunk.text) if is_last else start + length
        logprobs = TokenLogprobs()
        if (row := next(rows, None)) is not None:
            logprobs.add(*zip(*row, strict=True))
        single = msgspec.structs.replace(
            chunk, text=chunk.text[start:end], token_ids=[token_id], logprobs=logprobs, text_lengths=[length]
        )
        yield single if is_last else msgspec.structs.replace(single, finish_reason=None, stop_reason=None)
        start = end
