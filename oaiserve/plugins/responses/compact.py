"""Shortens conversations: the model writes a summary, and the conversation continues with it instead of its items.

The messages of users and of the system stay unchanged. A client requests it with the route /v1/responses/compact, which
stores nothing, or with a `compaction_trigger` at the end of the input of a response.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request

from oaiserve.engine.request import ChatPrompt, PromptDone, TokenChunk, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.responses.body import CompactionBody, ResponsesBody
from oaiserve.plugins.responses.items import Item, encrypted, kept
from oaiserve.plugins.responses.output import CompactionItem, OutputMessage, ResponseObject, ResponseUsage, item_id
from oaiserve.plugins.responses.request_input import Earlier, RequestInput, conversed, read_all_earlier
from oaiserve.plugins.responses.shape import ResponsesShape
from oaiserve.routes.answer.common_shape import encode
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.intake.invalid import invalid
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.intake.turns import in_turns_if_large
from oaiserve.routes.operation import Operation

SUMMARY_TOKENS = 1024  # maximum, or a quarter of the context if that is less
SUMMARIZE = {
    "role": "user",
    "content": "Write a summary of this conversation for somebody who goes on with it, and who will have only the "
    "messages of the user and your summary. Say what is wanted, what was done and found out, which names, paths, "
    "numbers and decisions are still needed, and what comes next. Call no tools. Write the summary and nothing else.",
}
_OF_SUMMARY: dict[str, Any] = {"temperature": 0, "max_output_tokens": SUMMARY_TOKENS, "thinking_token_budget": 0}


class Compaction(msgspec.Struct):
    """A shorter form of a conversation: `output` replaces all of its items."""

    id: str
    created_at: int
    output: list[Item]
    usage: ResponseUsage
    object: str = "response.compaction"


class SummaryShape(ResponsesShape):
    """Renders the model's answer as a response with one item, a compaction. Nothing is streamed."""

    def _read(self, chunk: TokenChunk) -> None:
        super()._read(chunk)
        if chunk.finish_reason is None:
            return
        messages = (item for item in self._output.items if isinstance(item, OutputMessage))
        summary = "".join(part.text for message in messages for part in message.content).strip()
        self._is_cut = False  # A truncated summary is just a shorter summary.
        item = CompactionItem(item_id("cmp", self._head.id.removeprefix("resp_"), "0"), encrypted(summary))
        self._items = [item] if summary else []
        for event in ("added", "done") if summary else ():
            self._add_event(f"response.output_item.{event}", {"output_index": 0, "item": item})

    def final(self, usage: Usage) -> ResponseObject:
        self._check()
        return super().final(usage)

    def _check(self) -> None:
        if not self._items:
            raise InvalidRequest("The model wrote no summary of this conversation.", param="input", code="no_summary")


class CompactionShape(SummaryShape):
    """Renders the model's answer as a compaction, with the items in `kept`."""

    kept: Sequence[Item] = ()

    def whole(self, _prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        (chunk,) = choices
        self._read(chunk)
        self._check()
        output = [*self.kept, *msgspec.to_builtins(self._items)]
        yield encode(Compaction(self._head.id, self._head.created, output, self._usage_object(usage)))


@Operation(
    summary="Make a conversation shorter, for responses that go on from it.",
    group="Generation",
    body=CompactionBody,
    answer=Compaction,
    example={"input": "What is the capital of France?"},
)
async def compact(http: Request) -> Answer:
    intake = await read(http, CompactionBody, _as_response, id_prefix="resp_")
    earlier = await read_all_earlier(http, intake)
    return await in_turns_if_large(http, _answer(intake, earlier), intake.num_bytes, always=True)


def _as_response(intake: Intake[CompactionBody]) -> Intake[ResponsesBody]:
    """Return the request as one for a response with the likeliest tokens and without reasoning."""
    fields = msgspec.structs.asdict(intake.body)
    if intake.body.input is None and intake.body.previous_response_id is None:
        raise invalid("input", "is required without 'previous_response_id'")
    return intake.with_body(ResponsesBody(**{**fields, "input": fields["input"] or [], "store": False, **_OF_SUMMARY}))


def is_triggered(body: ResponsesBody) -> bool:
    """Return whether a request for a response asks for a compaction: its input then ends with the trigger."""
    return bool(body.input) and isinstance(last := body.input[-1], dict) and last.get("type") == "compaction_trigger"


def is_in(body: ResponsesBody) -> bool:
    """Return whether the input has a summary of a conversation."""
    items = body.input if isinstance(body.input, list) else []
    return any(isinstance(item, dict) and item.get("type") == "compaction" for item in items)


def for_summary(intake: Intake[ResponsesBody]) -> Intake[ResponsesBody]:
    """Return a request that ends with the trigger as a request for a summary: greedy, and without log-probabilities."""
    plain = {"input": intake.body.input[:-1], "include": None, "top_logprobs": None}
    return intake.with_body(msgspec.structs.replace(intake.body, **plain, **_OF_SUMMARY))


def with_wish(prompt: ChatPrompt) -> ChatPrompt:
    """Return a prompt followed by the request for a summary. The prefix cache has all but that request."""
    return replace(prompt, messages=[*prompt.messages, SUMMARIZE])


def _answer(intake: Intake[ResponsesBody], earlier: Earlier) -> Work[Answer]:
    body = intake.body
    serving = intake.serving
    exchange = intake.exchange
    adaptations = exchange.adaptations
    offered, conversation = conversed(body, serving, earlier, adaptations, is_constrained=False)
    whole = RequestInput(
        body, serving, conversation, earlier, intake.media, adaptations, intake.head.unique_id, needs_input=False
    )
    prompt, _ = yield from whole.truncated(SUMMARY_TOKENS, keeps_room=True)
    own = conversation.own_params(SUMMARY_TOKENS, None, None)
    params, wanted = intake.checked(own)
    shape = CompactionShape(
        intake.head,
        wanted,
        conversation,
        exchange.answer_facts,
        {},
        offered,
        unix_ns=serving.runtime.unix_ns,
        stream=False,
        reuse=exchange.prompt_reuse,
        is_compacted=False,
        encrypts=False,
    )
    shape.kept = kept([*whole.earlier, *whole.items])
    return answer_to(intake, params, (with_wish(prompt),), shape)
