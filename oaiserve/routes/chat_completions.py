"""/v1/chat/completions: its messages and its own parameters, tools and reasoning among them."""

from __future__ import annotations

from starlette.requests import Request as HTTPRequest

from oaiserve.routes.answer.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.answer.respond import Answer, answer_to
from oaiserve.routes.chat import constraints
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.messages import build_prompt, with_template_parameters
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
    body = with_template_parameters(intake.body, note)
    dialect = intake.serving.dialect
    conversation = Conversation(
        dialect,
        requested_tools(body, note),
        body.chat_template_kwargs or {},
        effort=body.reasoning_effort,
        thinking_budget=parameters.integer(body, "thinking_token_budget"),
        is_constrained=bool(body.stop) or constraints.is_constrained(body),
        asks_for_answer=body.add_generation_prompt is not False and not body.continue_final_message,
        shows_tags=body.reasoning_format == "none",
    )
    num_logprobs = parameters.top_logprobs(body, bool(body.logprobs), "'logprobs': true")
    own = conversation.own_params(parameters.max_tokens(body), num_logprobs, constraints.grammar(body))
    params, wanted = intake.checked(own)
    prompt = build_prompt(body, body.messages, dialect, conversation.shown_tools, intake.media, note)
    prompt = conversation.completed(prompt)
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    shape = ChatShape(
        kind,
        intake.head,
        wanted,
        conversation,
        intake.exchange.tool_calls,
        shows_reasoning=body.include_reasoning is not False,
    )
    return answer_to(intake, conversation.continuing(params, prompt), (prompt,), shape)
