"""The routes of Anthropic's API: /v1/messages, and /v1/messages/count_tokens for the length of a prompt."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import ANTHROPIC_PATH, ThreadUnsupported
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.messages.body import CountTokensBody, MessagesBody, OutputConfig
from oaiserve.plugins.messages.prompt import check_thinking, conversed
from oaiserve.plugins.messages.shape import AnswerMessage, MessageEvent, MessagesShape
from oaiserve.routes.adaptations import Adaptations, Note
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.chat import constraints
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.media import MediaReader, read_media
from oaiserve.routes.intake.parameters import integer
from oaiserve.routes.intake.read import Intake, read, read_parsed
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.tokens import answer_in_turns, encoded

# Parameters of the other routes, and their equivalents here.
_ELSEWHERE = {
    "max_completion_tokens": "use 'max_tokens'",
    "stop": "use 'stop_sequences'",
    "response_format": "use 'output_config.format'",
    "prompt_logprobs": "a message has no place for it",
    "compaction": "send the turns, or a summary of your own",
    "return_progress": "its streams tell of it without being asked",
    "return_token_ids": "a message has no place for them",
}


@Operation(
    summary="Answer a conversation as Anthropic's API does, whole or streamed.",
    group="Generation",
    body=MessagesBody,
    answer=AnswerMessage,
    event=MessageEvent,
    example={"model": "demo", "messages": [{"role": "user", "content": "Good morning"}], "max_tokens": 64},
)
async def messages(http: Request) -> Answer:
    # Between calls of tools, the budget is for all reasoning of a turn, which has several answers.
    is_budget_of_turn = "interleaved-thinking" in http.headers.get("anthropic-beta", "")
    answer = partial(_answer, is_budget_of_turn=is_budget_of_turn)
    return await read(http, MessagesBody, answer, id_prefix="msg_")


def _answer(intake: Intake[MessagesBody], *, is_budget_of_turn: bool) -> Answer:
    body = intake.body
    note = intake.exchange.adaptations.note
    _refuse_thread(body)
    parameters.refuse(body, ANTHROPIC_PATH, _ELSEWHERE)
    config = body.output_config or OutputConfig()
    wanted_format = config.format or body.output_format
    if wanted_format is None:
        json_format = None
    else:
        json_format = constraints.json_format(wanted_format.schema)
        if wanted_format.type is None:
            note("output_config.format", "has no type, and is read as json_schema")
    stop = parameters.strings("stop_sequences", body.stop_sequences or [])
    is_constrained = bool(stop) or json_format is not None or constraints.is_constrained(body)
    conversation, prompt = conversed(body, intake.serving.dialect, intake.media, note, is_constrained=is_constrained)
    max_tokens = integer(body, "max_tokens") or 0
    check_thinking(body.thinking, None if is_budget_of_turn else max_tokens)
    intake.exchange.reasoning_level = config.effort
    own = conversation.own_params(max_tokens, None, constraints.grammar(body, note, json_format))
    params, wanted = intake.checked(replace(own, stop=stop))
    if body.diagnostics is not None:
        intake.exchange.prompt_reuse.compare_with = body.diagnostics.previous_message_id or ""
    shape = MessagesShape(
        intake.head,
        wanted,
        conversation,
        intake.exchange.answer_facts,
        reuse=intake.exchange.prompt_reuse,
        max_tokens=max_tokens,
        shows_reasoning=body.thinking is None or body.thinking.display != "omitted",
        stream=bool(body.stream),
    )
    return answer_to(intake, conversation.continuing(params, prompt), (prompt,), shape)


def _refuse_thread(body: MessagesBody | CountTokensBody) -> None:
    if body.thread is not None:
        message = "'thread' is not supported by this server. Please send the whole conversation without it."
        raise ThreadUnsupported(message, param="thread")


class TokenCount(msgspec.Struct):
    """The number of tokens of a prompt."""

    input_tokens: int


@Operation(
    summary="Count the tokens of a conversation.",
    group="Tokenizer",
    body=CountTokensBody,
    answer=TokenCount,
    example={"model": "demo", "messages": [{"role": "user", "content": "Good morning"}]},
)
async def count_tokens(request: Request) -> Response:
    adaptations = Adaptations()
    body, num_bytes = await read_parsed(request, CountTokensBody, adaptations.note)
    media = await read_media(request, body, num_bytes)
    work = _count(serving_of(request), body, media, adaptations.note)
    return await answer_in_turns(request, body.model, work, num_bytes + media.num_bytes, adaptations)


def _count(serving: Serving, body: CountTokensBody, media: MediaReader, note: Note) -> Work[bytes]:
    _refuse_thread(body)
    check_thinking(body.thinking, None)
    _, prompt = conversed(body, serving.dialect, media, note, is_constrained=False)
    ids = yield from encoded(serving, prompt)
    return msgspec.json.encode(TokenCount(len(ids)))
