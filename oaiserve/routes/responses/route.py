"""POST /v1/responses: its own parameters, the talk that a request goes on from, and what is kept of its answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt, Grammar, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.routes.bodies import LOGPROBS, MAX_KEY_CHARACTERS, MAX_METADATA, MAX_VALUE_CHARACTERS, ResponsesBody
from oaiserve.routes.constraints import is_constrained, text_format
from oaiserve.routes.conversation import Talk
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.objects import PlainText, ResponseTool, TextOptions
from oaiserve.routes.operation import Operation, documented
from oaiserve.routes.parameters import Wanted, integer
from oaiserve.routes.prepare import OwnParams, prepare
from oaiserve.routes.respond import Answer
from oaiserve.routes.responses.items import Item, chat_messages, input_items, references
from oaiserve.routes.responses.output import item_id, response_ids
from oaiserve.routes.responses.response_object import ResponseEvent, ResponseObject
from oaiserve.routes.responses.shape import ResponsesShape
from oaiserve.routes.responses.store import StoredResponse, TalkTooLarge
from oaiserve.routes.responses.tools import response_tools
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.shapes import Head, encode
from oaiserve.routes.tool_prompt import prompt_with_tools

_decoder = msgspec.json.Decoder(ResponsesBody)

MAX_REFERENCES = 128  # to items of other responses
# Parameters of the other routes, and what this one has for them.
_ELSEWHERE = {
    "max_tokens": "use 'max_output_tokens'",
    "max_completion_tokens": "use 'max_output_tokens'",
    "response_format": "use 'text.format'",
    "prompt_logprobs": "a response has no place for it",
    "return_token_ids": "a response has no place for them",
    "return_tokens_as_token_ids": "a response has no place for them",
}
_ABSENT = {
    "background": "this server answers while the client waits. Leave it out",
    "conversation": "this server has no conversations. Use 'previous_response_id'",
    "prompt": "this server has no stored prompts. Use 'instructions' and 'input'",
}


@documented(
    Operation(
        summary="Answer a talk as a response, whole or streamed.",
        group="Generation",
        body=ResponsesBody,
        answer=ResponseObject,
        event=ResponseEvent,
        example={"input": "What is the capital of France?", "max_output_tokens": 64},
    )
)
async def responses(http: HTTPRequest) -> Answer:
    asked = _Asked(serving_of(http), http.state.exchange, http.state.owner)
    return await prepare(
        http,
        _decoder,
        id_prefix="resp_",
        own_params=asked.own_params,
        prompts=asked.prompts,
        shape=asked.shape,
        recall=asked.recall,
        before_end=asked.keep,
    )


class _StoredOutput(msgspec.Struct):
    output: list[Item]


_stored_output = msgspec.json.Decoder(_StoredOutput)
_stored_items = msgspec.json.Decoder(list[Item])


class _Asked:
    """One request, whose talk, parameters, prompt and answer share what is found out about it."""

    def __init__(self, serving: Serving, exchange: Exchange, owner: str) -> None:
        self._serving = serving
        self._exchange = exchange
        self._owner = owner
        self._turns: list[StoredResponse] = []  # that this one goes on from
        self._referred: list[StoredResponse] = []  # that have items which the client refers to
        self._items: list[Item] = []  # of this turn
        self._previous_id: str | None = None
        self._stores = False
        self._talk: Talk
        self._shape: ResponsesShape

    async def recall(self, body: ResponsesBody) -> int:
        """Find what is stored of the talk so far, and return how many bytes that has."""
        store, most_bytes = self._serving.responses, self._serving.body_limit_bytes
        if body.previous_response_id is not None:
            self._previous_id = body.previous_response_id
            try:
                self._turns = await store.talk(self._owner, self._previous_id, most_bytes)
            except TalkTooLarge:
                raise invalid(
                    "previous_response_id", f"the talk up to there has more than {int(most_bytes)} bytes"
                ) from None
            if not self._turns:
                raise InvalidRequest(
                    f"The previous response {show(self._previous_id)} is not there, or one before it is not: it was "
                    "not stored, was deleted, or was stored too long ago.",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            self._exchange.conversation_id = self._turns[-1].conversation_id
        found = response_ids(references(body.input))
        if len(found) > MAX_REFERENCES:
            raise invalid("input", f"may refer to items of at most {MAX_REFERENCES} responses, got {len(found)}")
        for response_id in found:
            if (stored := await store.get(self._owner, response_id)) is not None:
                self._referred.append(stored)
        num_bytes = sum(stored.num_bytes for stored in (*self._turns, *self._referred))
        if num_bytes > most_bytes:
            raise invalid("input", f"the talk with the items that it refers to has more than {int(most_bytes)} bytes")
        return num_bytes

    def own_params(self, body: ResponsesBody) -> OwnParams:
        _refuse_what_is_not_here(body)
        self._stores = body.store is not False and self._serving.stores_responses
        asked = _asked_format(body)
        self._talk = Talk(
            self._serving.dialect,
            response_tools(body),
            {**_effort(body), **(body.chat_template_kwargs or {})},
            is_constrained=bool(body.stop) or asked is not None or is_constrained(body),
        )
        num_logprobs = _num_logprobs(body)
        return self._talk.own_params(
            integer(body, "max_output_tokens"),
            num_logprobs,
            asked=asked,
            text_lengths=num_logprobs is not None and self._talk.reads_calls,
        )

    def prompts(self, body: ResponsesBody) -> tuple[ChatPrompt]:
        unique_id = self._exchange.unique_id
        num_made = 0

        def new_id(prefix: str) -> str:
            nonlocal num_made
            num_made += 1
            return item_id(prefix, unique_id, f"i{num_made}")

        referred = {item["id"]: item for item in _items_of(self._referred)}
        self._items = input_items(body.input, new_id, referred)
        messages = chat_messages(_items_of(self._turns), self._items)
        if body.instructions is not None:
            messages.insert(0, {"role": "system", "content": body.instructions})
        prompt = prompt_with_tools(messages, self._talk.shown_tools, self._serving.dialect, param="input")
        return (self._talk.completed(prompt),)

    def shape(self, body: ResponsesBody, head: Head, wanted: Wanted) -> ResponsesShape:
        if self._stores and self._exchange.conversation_id is None:
            self._exchange.conversation_id = head.id
        self._shape = ResponsesShape(
            head, wanted, self._talk, self._exchange.tool_calls, self._told(body), stream=bool(body.stream)
        )
        return self._shape

    async def keep(self, usage: Usage) -> None:
        """Store the answer, before the client knows that it is complete."""
        if not self._stores:
            return
        response_id, conversation_id = self._exchange.response_id, self._exchange.conversation_id
        assert response_id is not None
        assert conversation_id is not None
        turn = self._shape.stored(usage), encode(self._items)
        stored = StoredResponse(response_id, conversation_id, self._previous_id, *turn)
        await self._serving.responses.put(self._owner, stored)

    def _told(self, body: ResponsesBody) -> dict[str, Any]:
        """Return the parameters as they took effect."""
        defaults = self._serving.engine.default_params
        text = body.text or TextOptions()
        form = msgspec.to_builtins(text.format or PlainText())
        return {
            "instructions": body.instructions,
            "max_output_tokens": integer(body, "max_output_tokens"),
            "max_tool_calls": integer(body, "max_tool_calls"),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": self._stores,
            "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
            "text": {"format": form} | ({} if text.verbosity is None else {"verbosity": text.verbosity}),
            "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
            "tools": [_told_tool(tool) for tool in body.tools or []],
            "top_logprobs": integer(body, "top_logprobs") or 0,
            "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "metadata": body.metadata or {},
            "user": body.user,
        }


def _told_tool(tool: ResponseTool) -> dict[str, Any]:
    return {"description": None, "parameters": None, "strict": None, **msgspec.to_builtins(tool)}


def _items_of(turns: Iterable[StoredResponse]) -> Iterable[Item]:
    for turn in turns:
        yield from _stored_items.decode(turn.input_items)
        yield from _stored_output.decode(turn.response).output


def _refuse_what_is_not_here(body: ResponsesBody) -> None:
    for name, hint in (_ELSEWHERE | _ABSENT).items():
        value = getattr(body, name)
        if value is not None and value is not False:
            raise invalid(name, f"is not available on /v1/responses: {hint}")
    if body.n is not None and body.n != 1:
        raise invalid("n", f"must be 1, because a response is one answer, got {show(body.n)}")
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs are allowed, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARACTERS:
            raise invalid("metadata", f"a key may have {MAX_KEY_CHARACTERS} characters, got {show(key)}")
        if len(value) > MAX_VALUE_CHARACTERS:
            raise invalid("metadata", f"a value may have {MAX_VALUE_CHARACTERS} characters, got {len(value)}")


def _asked_format(body: ResponsesBody) -> Grammar | None:
    return None if body.text is None or body.text.format is None else text_format(body.text.format)


def _effort(body: ResponsesBody) -> dict[str, str]:
    """Return the effort of the reasoning as a variable of the template. A summary is never made."""
    effort = None if body.reasoning is None else body.reasoning.effort
    return {} if effort is None else {"reasoning_effort": effort}


def _num_logprobs(body: ResponsesBody) -> int | None:
    num_top = integer(body, "top_logprobs")
    if LOGPROBS in (body.include or []):
        return num_top or 0
    if num_top:
        raise invalid("top_logprobs", f"is only allowed with 'include': ['{LOGPROBS}']")
    return None
