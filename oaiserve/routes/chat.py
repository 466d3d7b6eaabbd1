"""/v1/chat/completions: its messages and its own parameters, tools and reasoning among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes import constraints, parameters
from oaiserve.routes.bodies import ChatBody, TokenizeBody
from oaiserve.routes.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.conversation import Conversation
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.invalid import invalid
from oaiserve.routes.media import MediaPart, MediaReader
from oaiserve.routes.objects import (
    AssistantMessage,
    CalledFunction,
    Content,
    Message,
    SeenContent,
    TextPart,
    ToolMessage,
)
from oaiserve.routes.operation import Operation
from oaiserve.routes.prepare import Intake, prepare
from oaiserve.routes.respond import Answer
from oaiserve.routes.tools import prompt_with_tools, requested_tools


@Operation(
    summary="Answer a conversation, whole or streamed.",
    group="Generation",
    body=ChatBody,
    answer=ChatCompletion,
    event=ChatCompletionChunk,
    example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64},
)
async def chat_completions(http: HTTPRequest) -> Answer:
    return await prepare(http, ChatBody, _answer, id_prefix="chatcmpl-")


def _answer(intake: Intake[ChatBody]) -> Answer:
    body, dialect = intake.body, intake.serving.dialect
    conversation = Conversation(
        dialect,
        requested_tools(body, intake.exchange.adaptations),
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
    prompt = conversation.completed(build_prompt(body, body.messages, dialect, conversation.shown_tools, intake.media))
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    shape = ChatShape(
        kind,
        intake.head,
        wanted,
        conversation,
        intake.exchange.tool_calls,
        shows_reasoning=body.include_reasoning is not False,
    )
    return intake.answer(params, (prompt,), shape)


def build_prompt(
    body: ChatBody | TokenizeBody,
    messages: Sequence[Message],
    dialect: Dialect,
    shown: Sequence[Mapping[str, Any]],
    media: MediaReader,
) -> ChatPrompt:
    """Return the prompt of these messages, with a description of the tools `shown`."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise invalid("continue_final_message", "must not be true together with 'add_generation_prompt'")
    checked = [_message(f"messages[{i}]", message, media) for i, message in enumerate(messages)]
    return prompt_with_tools(
        checked,
        shown,
        dialect,
        media,
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


def _message(where: str, message: Message, media: MediaReader) -> dict[str, Any]:
    """Return a message as templates take it."""
    name = {} if message.name is None else {"name": message.name}
    content = None if message.content is None else _content(f"{where}.content", message.content, media)
    match message:
        case AssistantMessage():
            reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
            if content is None and message.refusal is None and reasoning is None and not _calls(message):
                reason = "is required for the role 'assistant' if it calls no tools and has no reasoning"
                raise invalid("messages", reason, f"{where}.content")
            answered = (message.refusal or "") if content is None else content
            thought = {} if reasoning is None else {"reasoning": reasoning}
            return {"role": "assistant", "content": answered, **name, **thought, **_calls(message)}
        case ToolMessage():
            return {"role": "tool", "content": content, **name, "tool_call_id": message.tool_call_id}
    return {"role": message.__struct_config__.tag, "content": content, **name}


def _calls(message: AssistantMessage) -> dict[str, Any]:
    if message.tool_calls:
        return {"tool_calls": [_call(call.id, call.function) for call in message.tool_calls]}
    return {}


def _call(call_id: str | None, function: CalledFunction) -> dict[str, Any]:
    """Return a call of the history, with its arguments as a string."""
    arguments = function.arguments
    if isinstance(arguments, dict):
        arguments = msgspec.json.encode(arguments).decode()
    identity = {} if call_id is None else {"id": call_id}
    return {**identity, "type": "function", "function": {"name": function.name, "arguments": arguments or ""}}


def _content(where: str, content: Content | SeenContent, media: MediaReader) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [
        media.part(part, f"{where}[{i}]")
        if isinstance(part, MediaPart)
        else {"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal}
        for i, part in enumerate(content)
    ]
