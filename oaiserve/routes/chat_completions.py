"""/v1/chat/completions: an answer to messages, with tools and reasoning."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest

from oaiserve.routes.answer.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.chat import constraints
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.messages import build_prompt
from oaiserve.routes.chat.tools import requested_tools
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.body_types import ChatBody
from oaiserve.routes.intake.read import Intake, read
from oaiserve.routes.operation import Operation


@Operation(
    summary="Answer a conversation, whole or streamed.",
    group="Generation",
    body=ChatBody,
    answer=ChatCompletion,
    event=ChatCompletionChunk,
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64},
)
async def chat_completions(http: HTTPRequest) -> Answer:
    return await read(http, ChatBody, _answer, id_prefix="chatcmpl-")


def _answer(intake: Intake[ChatBody]) -> Answer:
    note = intake.exchange.adaptations.note
    body = parameters.with_template_parameters(intake.body, note)
    limits = parameters.chat_limits(body)
    grammar = constraints.grammar(body, note)
    dialect = intake.serving.dialect
    conversation = Conversation(
        dialect,
        requested_tools(body, note),
        body.chat_template_kwargs or {},
        effort=body.reasoning_effort,
        thinking_budget=limits.thinking_budget,
        is_constrained=bool(body.stop) or grammar is not None,
        asks_for_answer=body.add_generation_prompt is not False and not body.continue_final_message,
        shows_tags=body.reasoning_format == "none",
    )
    intake.exchange.has_prediction = body.prediction is not None
    intake.exchange.reasoning_level = body.reasoning_effort
    own = conversation.own_params(limits.max_tokens, limits.num_logprobs, grammar)
    params, wanted = intake.checked(own)
    prompt = build_prompt(body, body.messages, dialect, conversation.shown_tools, intake.media, note)
    prompt = conversation.completed(prompt)
    params = conversation.continuing(params, prompt)
    shape = ChatShape(
        "chat.completion.chunk" if body.stream else "chat.completion",
        intake.head,
        wanted,
        conversation,
        intake.exchange.answer_facts,
        shows_reasoning=body.include_reasoning is not False,
    )
    return answer_to(intake, params, (prompt,), shape)
