"""The routes of /v1/responses that read an input: they answer it, or count its tokens."""

from __future__ import annotations

from dataclasses import replace
from random import getrandbits
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.engine.request import SamplingParams, Usage
from oaiserve.facts.record import ToolCallOutcome
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.responses import compact
from oaiserve.plugins.responses.background import WAIT_SECONDS, WINDOW_SECONDS, BackgroundAnswer
from oaiserve.plugins.responses.background_store import Job
from oaiserve.plugins.responses.body import (
    ENCRYPTED,
    LOGPROBS,
    BackgroundOptions,
    PromptCacheOptions,
    ResponseInputBody,
    ResponsesBody,
    ResponseTool,
    TextOptions,
)
from oaiserve.plugins.responses.conversations import change, with_turn
from oaiserve.plugins.responses.offered import OfferedTools
from oaiserve.plugins.responses.output import ResponseEvent, ResponseObject
from oaiserve.plugins.responses.request_input import (
    Earlier,
    RequestInput,
    conversed,
    earlier_media,
    items_of,
    read_all_earlier,
    read_earlier,
    text_format,
)
from oaiserve.plugins.responses.runs import Run
from oaiserve.plugins.responses.shape import ResponsesShape
from oaiserve.plugins.responses.state import State, state_of
from oaiserve.plugins.responses.store import StoredResponse
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.answer.common_shape import encode
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.chat import constraints
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.invalid import invalid
from oaiserve.routes.intake.object_types import PlainText
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Intake, read, read_parsed
from oaiserve.routes.intake.turns import in_turns_if_large
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.tokens import answer_in_turns, encoded
from oaiserve.wire.continuation import StreamIds

# Parameters of other routes or servers, and their equivalents here.
_ELSEWHERE = {
    "max_tokens": "use 'max_output_tokens'",
    "max_completion_tokens": "use 'max_output_tokens'",
    "response_format": "use 'text.format'",
    "prompt_logprobs": "a response has no place for it",
    "return_progress": "its streams tell of it without being asked",
    "return_token_ids": "a response has no place for them",
    "prompt": "this server has no stored prompts. Use 'instructions' and 'input'",
}
_TOOL_FIELDS = ("description", "parameters", "strict")  # These are null if the client has left them out.


@Operation(
    summary="Answer a conversation as a response, whole or streamed.",
    group="Generation",
    body=ResponsesBody,
    answer=ResponseObject,
    event=ResponseEvent,
    example={"input": "What is the capital of France?", "max_output_tokens": 64},
)
async def responses(http: Request) -> Answer | BackgroundAnswer | Response:
    """Answer in two parts. Between them, the stored responses that the request continues are read."""
    intake = await read(http, ResponsesBody, lambda intake: intake, id_prefix="resp_")
    if compacts := compact.is_triggered(intake.body):
        intake = compact.for_summary(intake)
    earlier = await read_all_earlier(http, intake)
    if earlier.turns:
        intake.exchange.conversation_id = earlier.turns[-1].conversation_id

    def answer() -> Work[Answer | BackgroundAnswer]:
        yield None
        return (yield from _answer(intake, earlier, state_of(http), compacts=compacts))

    is_slow = compacts or intake.body.truncation == "auto"
    result = await in_turns_if_large(http, answer(), intake.num_bytes + intake.media.num_bytes, always=is_slow)
    if isinstance(result, BackgroundAnswer):
        # Otherwise a full disk would be noticed at the end, when the client has left.
        await state_of(http).store.check_room(earlier.owner, result.queued)
        return await result.accepted()
    return result


class InputTokens(msgspec.Struct):
    """The number of tokens that the prompt of a response would have."""

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
    adaptations = Adaptations()
    body, num_bytes = await read_parsed(request, ResponseInputBody, adaptations.note)
    earlier = await read_earlier(request, body)
    media = await earlier_media(request, body, earlier, num_bytes)

    def count() -> Work[bytes]:
        _, conversation = conversed(body, serving, earlier, adaptations, is_constrained=False)
        prompt = RequestInput(body, serving, conversation, earlier, media, adaptations, request.state.unique_id).prompt
        return encode(InputTokens(len((yield from encoded(serving, prompt)))))

    return await answer_in_turns(
        request, body.model, count(), num_bytes + media.num_bytes + earlier.num_bytes, adaptations
    )


def _answer(
    intake: Intake[ResponsesBody], earlier: Earlier, state: State, *, compacts: bool
) -> Work[Answer | BackgroundAnswer]:
    body = intake.body
    serving = intake.serving
    exchange = intake.exchange
    parameters.refuse(body, "/v1/responses", _ELSEWHERE)
    parameters.check_metadata(body.metadata or {})
    window = (body.background_options or BackgroundOptions()).completion_window or "soonest"
    # The time since a response that is made again was accepted. A gateway sends the ids of new ones, too.
    age_seconds = 0.0 if exchange.ids is None else max(0.0, serving.runtime.unix_ns() / 1e9 - intake.head.created)
    seed = getrandbits(63) if exchange.ids is None else exchange.ids.seed
    if body.background:
        _check_background(body, serving)
        exchange.is_streaming = True  # Clients may follow the stream.
        exchange.is_background = True
        exchange.background_wait_ns = max(0, int((WAIT_SECONDS[window] - age_seconds) * 1e9))
        exchange.ids = None  # No other server continues it.
    elif window != "soonest":
        raise invalid("background_options.completion_window", "is only allowed with 'background': true")
    is_constrained = bool(body.stop) or constraints.is_constrained(body)
    offered, conversation = conversed(body, serving, earlier, exchange.adaptations, is_constrained=is_constrained)
    if compacts and (is_constrained or conversation.is_forced or text_format(body) is not None):
        raise invalid("input", "a 'compaction_trigger' asks for a text without a form, stop strings or calls")
    if offered.left_out:
        exchange.answer_facts.tool_calls[ToolCallOutcome.LEFT_OUT] = len(offered.left_out)
    has_logprobs = LOGPROBS in (body.include or [])
    num_logprobs = parameters.top_logprobs(body, has_logprobs, f"'include': ['{LOGPROBS}']")
    max_tokens = parameters.token_limit(body, "max_output_tokens")
    options = body.prompt_cache_options or PromptCacheOptions()
    only_prepares = bool(options.prewarm) and not compacts
    own = conversation.own_params(
        0 if only_prepares else max_tokens,
        num_logprobs,
        constraints.grammar(body, exchange.adaptations.note, text_format(body)),
        text_lengths=num_logprobs is not None and conversation.reads_calls,
    )
    params, wanted = intake.checked(own)
    if body.background and params.seed is None:
        params = replace(params, seed=seed)
    exchange.reasoning_level = None if body.reasoning is None else body.reasoning.effort
    exchange.previous_response_id = body.previous_response_id
    adaptations = exchange.adaptations
    whole = RequestInput(
        body, serving, conversation, earlier, intake.media, adaptations, intake.head.unique_id, needs_input=not compacts
    )
    prompt = whole.prompt
    num_dropped = 0
    if body.truncation == "auto" or compacts:
        prompt, num_dropped = yield from whole.truncated(max_tokens, keeps_room=compacts)
    stores = body.store is not False and serving.config.of(StoreOptions).stores_responses
    if stores and exchange.conversation_id is None:
        exchange.conversation_id = intake.head.id
    exchange.prompt_reuse.continues = body.previous_response_id or ""
    exchange.prompt_reuse.compare_with = options.comparison_response_id or exchange.prompt_reuse.compare_with
    shape = (compact.SummaryShape if compacts else ResponsesShape)(
        intake.head,
        wanted,
        conversation,
        exchange.answer_facts,
        _reported(intake, offered, params, stores=stores) | {"truncated_items": num_dropped or UNSET},
        offered,
        unix_ns=serving.runtime.unix_ns,
        reuse=exchange.prompt_reuse,
        is_compacted=compact.is_in(body),
        stream=exchange.is_streaming and not compacts,
        encrypts=ENCRYPTED in (body.include or []),
        only_prepares=only_prepares,
    )

    head = intake.head  # `turn` and `store` stay until the response is complete, and must not hold the body.

    def turn(response: bytes) -> StoredResponse:
        assert exchange.conversation_id is not None
        ids = head.id, exchange.conversation_id, body.previous_response_id
        return StoredResponse(*ids, response, encode(whole.items))

    async def store(usage: Usage) -> None:
        """Store the answer before the client sees its end."""
        stored = turn(shape.stored(usage))
        if stores:
            await state.store.put(earlier.owner, stored)
        if body.conversation is not None:  # If it has been deleted, it stays deleted.
            added = await run_in_threadpool(lambda: list(items_of([stored])))
            await change(
                state.store,
                earlier.owner,
                stored.conversation_id,
                lambda old: with_turn(old, added, head.unique_id, len(whole.items))[0],
            )

    keeps = stores or body.conversation is not None
    asking = compact.with_wish(prompt) if compacts else prompt
    answer = answer_to(intake, params, (asking,), shape, before_end=store if keeps else None)
    if not body.background:
        return answer
    ids = StreamIds(intake.head.unique_id, intake.head.created, seed)
    expires_at = intake.head.created + WINDOW_SECONDS[window]
    job = Job(earlier.owner, intake.head.model, ids, expires_at, bytes(intake.content))
    return BackgroundAnswer(answer, shape, Run(earlier.owner, turn(b"")), state, job, streams=bool(body.stream))


def _reported(
    intake: Intake[ResponsesBody], offered: OfferedTools, params: SamplingParams, *, stores: bool
) -> dict[str, Any]:
    body = intake.body
    text = body.text or TextOptions()
    form = msgspec.to_builtins(text.format or PlainText())
    if form["type"] == "json_schema":
        form["strict"] = bool(form["strict"])

    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "conversation": UNSET if body.conversation is None else {"id": intake.exchange.conversation_id},
        "max_output_tokens": parameters.token_limit(body, "max_output_tokens"),
        "max_tool_calls": integer(body, "max_tool_calls"),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "store": stores,
        "temperature": params.temperature,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "text": {"format": form} | ({} if text.verbosity is None else {"verbosity": text.verbosity}),
        "tool_choice": _without_nulls(msgspec.to_builtins(body.tool_choice or "auto")),
        "tools": [_shown(tool) for tool in body.tools or [] if tool.type not in offered.left_out],
        "ignored_tools": list(offered.left_out) or UNSET,
        "top_logprobs": integer(body, "top_logprobs") or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _without_nulls(value: Any) -> Any:
    """Return a choice of tools without the fields that its kind has not got."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def _shown(tool: ResponseTool) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(tool)
    return (dict.fromkeys(_TOOL_FIELDS) if tool.type == "function" else {}) | fields


def _check_background(body: ResponsesBody, serving: Serving) -> None:
    if body.store is False or not serving.config.of(StoreOptions).stores_responses:
        raise invalid("background", "a response that is made in the background has to be stored")
