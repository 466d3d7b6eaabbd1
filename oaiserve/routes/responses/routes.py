"""The routes of /v1/responses: its parameters, the conversation that a request goes on from, and stored responses.

The routes that read and delete stored responses make no records.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, NoReturn

import msgspec
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.request import ChatPrompt, Grammar, Usage
from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.routes import constraints, parameters
from oaiserve.routes.bodies import (
    ENCRYPTED,
    LOGPROBS,
    MAX_KEY_CHARACTERS,
    MAX_METADATA,
    MAX_VALUE_CHARACTERS,
    ResponseInputBody,
    ResponsesBody,
)
from oaiserve.routes.body import in_turns_if_large, read_parsed
from oaiserve.routes.conversation import Conversation
from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.middleware import json_response
from oaiserve.routes.objects import PlainText, ResponseTool, TextOptions
from oaiserve.routes.operation import Operation, Parameter
from oaiserve.routes.parameters import integer
from oaiserve.routes.prepare import Intake, prepare
from oaiserve.routes.respond import Answer
from oaiserve.routes.responses.items import Item, chat_messages, input_items, references
from oaiserve.routes.responses.offered import OfferedTools, offered_tools
from oaiserve.routes.responses.output import ResponseEvent, ResponseObject, item_id, response_ids
from oaiserve.routes.responses.shape import ResponsesShape
from oaiserve.routes.responses.store import ConversationTooLarge, StoredResponse
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.shapes import encode
from oaiserve.routes.tokens import answer_in_turns, encoded
from oaiserve.routes.tools import prompt_with_tools

_decoder = msgspec.json.Decoder(ResponsesBody)
_input_decoder = msgspec.json.Decoder(ResponseInputBody)

MAX_REFERENCES = 128  # to items of other responses
# Parameters of the other routes, and their equivalents here.
_ELSEWHERE = {
    "max_tokens": "use 'max_output_tokens'",
    "max_completion_tokens": "use 'max_output_tokens'",
    "response_format": "use 'text.format'",
    "prompt_logprobs": "a response has no place for it",
    "return_token_ids": "a response has no place for them",
    "return_tokens_as_token_ids": "a response has no place for them",
}
_TOOL_FIELDS = ("description", "parameters", "strict")  # null if the client has left them out
_ABSENT = {
    "background": "this server answers while the client waits. Leave it out",
    "conversation": "this server has no conversations. Use 'previous_response_id'",
    "prompt": "this server has no stored prompts. Use 'instructions' and 'input'",
}


@Operation(
    summary="Answer a conversation as a response, whole or streamed.",
    group="Generation",
    body=ResponsesBody,
    answer=ResponseObject,
    event=ResponseEvent,
    example={"input": "What is the capital of France?", "max_output_tokens": 64},
)
async def responses(http: Request) -> Answer:
    """Answer in two parts: between them, stored responses that the request goes on from are read."""
    intake = await prepare(http, _decoder, lambda intake: intake, id_prefix="resp_")
    earlier = await _earlier(intake.serving, intake.body, http.state.owner)
    if earlier.turns:
        intake.exchange.conversation_id = earlier.turns[-1].conversation_id
    intake.num_bytes += earlier.num_bytes

    def answer() -> Generator[None, None, Answer]:
        yield
        return _answer(intake, earlier)

    return await in_turns_if_large(http, answer(), intake.num_bytes)


class InputTokens(msgspec.Struct):
    """The prompt of a response would have this many tokens."""

    input_tokens: int
    object: str = "response.input_tokens"


@Operation(
    summary="Count the tokens of the input of a response.",
    group="Tokenizer",
    body=ResponseInputBody,
    answer=InputTokens,
    example={"input": "Good morning"},
)
async def input_tokens(request: Request) -> Response:
    serving = serving_of(request)
    body, num_bytes = await read_parsed(request, _input_decoder)
    earlier = await _earlier(serving, body, request.state.owner)

    def count() -> Generator[None, None, bytes]:
        _, conversation = _conversation(body, serving, is_constrained=False)
        _, prompt = _prompt(body, serving, conversation, earlier, request.state.unique_id)
        return encode(InputTokens(len((yield from encoded(serving, prompt)))))

    return await answer_in_turns(request, body.model, count(), num_bytes + earlier.num_bytes)


class _StoredOutput(msgspec.Struct):
    output: list[Item]


_stored_output = msgspec.json.Decoder(_StoredOutput)
_stored_items = msgspec.json.Decoder(list[Item])


class _Earlier(NamedTuple):
    """The stored responses for a request of their owner: those before it, and those of items to which it refers."""

    owner: str
    turns: list[StoredResponse]
    referred: list[StoredResponse]

    @property
    def num_bytes(self) -> int:
        return sum(stored.num_bytes for stored in (*self.turns, *self.referred))


async def _earlier(serving: Serving, body: ResponsesBody | ResponseInputBody, owner: str) -> _Earlier:
    """Read the stored responses from the store. Raises InvalidRequest if they are missing, or too large together."""
    store, most_bytes = serving.responses, serving.body_limit_bytes
    turns: list[StoredResponse] = []
    if body.previous_response_id is not None:
        try:
            turns = await store.conversation(owner, body.previous_response_id, most_bytes)
        except ConversationTooLarge:
            raise invalid(
                "previous_response_id", f"the conversation up to there has more than {int(most_bytes)} bytes"
            ) from None
        if not turns:
            raise InvalidRequest(
                f"The previous response {show(body.previous_response_id)} is not there, or one before it is not: it "
                "was not stored, was deleted, or was stored too long ago.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
    found = response_ids(references(body.input))
    if len(found) > MAX_REFERENCES:
        raise invalid("input", f"may refer to items of at most {MAX_REFERENCES} responses, got {len(found)}")
    referred = [stored for one in found if (stored := await store.get(owner, one)) is not None]
    earlier = _Earlier(owner, turns, referred)
    if earlier.num_bytes > most_bytes:
        raise invalid(
            "input", f"the conversation with the items that it refers to has more than {int(most_bytes)} bytes"
        )
    return earlier


def _conversation(
    body: ResponsesBody | ResponseInputBody, serving: Serving, *, is_constrained: bool
) -> tuple[OfferedTools, Conversation]:
    """Return the tools and the reasoning of a request. `is_constrained`: beside `text.format`."""
    offered = offered_tools(body, refuses_hosted=serving.refuses_hosted_tools)
    conversation = Conversation(
        serving.dialect,
        offered.tools,
        body.chat_template_kwargs or {},
        effort=None if body.reasoning is None else body.reasoning.effort,  # a summary is never made
        thinking_budget=integer(body, "thinking_token_budget") if isinstance(body, ResponsesBody) else None,
        is_constrained=is_constrained or _text_format(body) is not None,
    )
    return offered, conversation


def _text_format(body: ResponsesBody | ResponseInputBody) -> Grammar | None:
    form = None if body.text is None else body.text.format
    return None if form is None else constraints.text_format(form)


def _prompt(
    body: ResponsesBody | ResponseInputBody,
    serving: Serving,
    conversation: Conversation,
    earlier: _Earlier,
    unique_id: str,
) -> tuple[list[Item], ChatPrompt]:
    """Return the items of the input, with ids of the response with this one, and the prompt."""
    numbers = itertools.count(1)  # of items without an id
    items = input_items(
        body.input,
        lambda prefix: item_id(prefix, unique_id, f"i{next(numbers)}"),
        {item["id"]: item for item in _items_of(earlier.referred)},
    )
    messages = chat_messages(_items_of(earlier.turns), items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    prompt = prompt_with_tools(messages, conversation.shown_tools, serving.dialect, param="input")
    return items, conversation.completed(prompt)


def _answer(intake: Intake[ResponsesBody], earlier: _Earlier) -> Answer:
    body, serving, exchange = intake.body, intake.serving, intake.exchange
    _refuse_what_is_not_here(body)
    is_constrained = bool(body.stop) or constraints.is_constrained(body)
    offered, conversation = _conversation(body, serving, is_constrained=is_constrained)
    if offered.left_out:
        exchange.tool_calls[ToolCallOutcome.LEFT_OUT] = len(offered.left_out)
    has_logprobs = LOGPROBS in (body.include or [])
    num_logprobs = parameters.top_logprobs(body, has_logprobs, f"'include': ['{LOGPROBS}']")
    own = conversation.own_params(
        integer(body, "max_output_tokens"),
        num_logprobs,
        constraints.grammar(body, _text_format(body)),
        text_lengths=num_logprobs is not None and conversation.reads_calls,
    )
    params, wanted = intake.checked(own)
    items, prompt = _prompt(body, serving, conversation, earlier, exchange.unique_id)
    stores = body.store is not False and serving.stores_responses
    if stores and exchange.conversation_id is None:
        exchange.conversation_id = intake.head.id
    shape = ResponsesShape(
        intake.head,
        wanted,
        conversation,
        exchange.tool_calls,
        _reported(intake, offered, stores=stores),
        offered,
        stream=bool(body.stream),
        encrypts=ENCRYPTED in (body.include or []),
    )

    async def store(usage: Usage) -> None:
        """Store the answer, before the client knows of its end."""
        assert exchange.conversation_id is not None
        ids = intake.head.id, exchange.conversation_id, body.previous_response_id
        await serving.responses.put(earlier.owner, StoredResponse(*ids, shape.stored(usage), encode(items)))

    return intake.answer(params, (prompt,), shape, before_end=store if stores else None)


def _reported(intake: Intake[ResponsesBody], offered: OfferedTools, *, stores: bool) -> dict[str, Any]:
    """Return the parameters as they took effect, for the answer."""
    body = intake.body
    defaults = intake.serving.engine.default_params
    text = body.text or TextOptions()
    form = msgspec.to_builtins(text.format or PlainText())
    return {
        "instructions": body.instructions,
        "max_output_tokens": integer(body, "max_output_tokens"),
        "max_tool_calls": integer(body, "max_tool_calls"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": stores,
        "temperature": defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        "text": {"format": form} | ({} if text.verbosity is None else {"verbosity": text.verbosity}),
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "tools": [_shown(tool) for tool in body.tools or [] if tool.type not in offered.left_out],
        "ignored_tools": list(offered.left_out) or UNSET,
        "top_logprobs": integer(body, "top_logprobs") or 0,
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }


def _shown(tool: ResponseTool) -> dict[str, Any]:
    given: dict[str, Any] = msgspec.to_builtins(tool)
    return (dict.fromkeys(_TOOL_FIELDS) if tool.type == "function" else {}) | given


def _items_of(turns: Iterable[StoredResponse]) -> Iterable[Item]:
    for turn in turns:
        yield from _stored_items.decode(turn.input_items)
        yield from _stored_output.decode(turn.response).output


def _refuse_what_is_not_here(body: ResponsesBody) -> None:
    parameters.refuse(body, "/v1/responses", _ELSEWHERE | _ABSENT)
    metadata = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise invalid("metadata", f"at most {MAX_METADATA} pairs are allowed, got {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARACTERS:
            raise invalid("metadata", f"a key may have {MAX_KEY_CHARACTERS} characters, got {show(key)}")
        if len(value) > MAX_VALUE_CHARACTERS:
            raise invalid("metadata", f"a value may have {MAX_VALUE_CHARACTERS} characters, got {len(value)}")


MAX_LISTED = 100  # OpenAI's limit and default
LISTED = 20
ORDER = Parameter("order", "asc has the first item first. Default: desc.", allowed=("asc", "desc"))
LIMIT = Parameter("limit", f"How many items. Default: {LISTED}.", is_integer=True, most=MAX_LISTED)
AFTER = Parameter("after", "The id of the item behind which to begin.")


class DeletedResponse(msgspec.Struct):
    """This response was deleted."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputItems(msgspec.Struct):
    """A page of the items that a client has sent for a response."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


@Operation(summary="A stored response.", group="Generation", answer=ResponseObject, errors=(NotFound,))
async def retrieve(request: Request) -> Response:
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        raise invalid("stream", "the events of a stored response are not kept. Read it without 'stream'")
    stored = await _stored(request)
    return Response(stored.response, media_type="application/json")


@Operation(summary="Delete a stored response.", group="Generation", answer=DeletedResponse, errors=(NotFound,))
async def delete(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not await serving_of(request).responses.delete(request.state.owner, response_id):
        _not_found(response_id)
    return json_response(DeletedResponse(response_id))


@Operation(
    summary="The input of a stored response.",
    group="Generation",
    answer=InputItems,
    query=(ORDER, LIMIT, AFTER),
    errors=(NotFound,),
)
async def list_input_items(request: Request) -> Response:
    """Answer with the input of the response, newest first, without that of earlier responses."""
    query = request.query_params
    order = ORDER.value(query.get(ORDER.name, "desc"))
    limit = LIMIT.value(query.get(LIMIT.name, f"{LISTED}"))
    stored = await _stored(request)
    content = await run_in_threadpool(_page, stored.input_items, order, limit, query.get(AFTER.name))
    return Response(content, media_type="application/json")


async def cancel(request: Request) -> Response:
    await _stored(request)
    raise InvalidRequest("Only a response that is made in the background can be cancelled, and this server makes none.")


def _page(content: bytes, order: str, limit: int, after: str | None) -> bytes:
    items = _stored_items.decode(content)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"there is no input item {show(after)} in this response")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return msgspec.json.encode(InputItems(shown, first_id, last_id, has_more=start + limit < len(items)))


async def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await serving_of(request).responses.get(request.state.owner, response_id)
    if stored is None:
        _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NoReturn:
    raise NotFound(
        f"There is no response {show(response_id)}: it was not stored, was deleted, or was stored too long ago.",
        param="response_id",
    )
