"""/v1/chat/completions: its messages and its own parameters, tools and reasoning among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt
from oaiserve.routes.answer.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.answer.respond import Answer
from oaiserve.routes.chat import constraints
from oaiserve.routes.chat.contents import ContentReader, thoughts_in
from oaiserve.routes.chat.conversation import Conversation
from oaiserve.routes.chat.foreign import text_of
from oaiserve.routes.chat.history import Placed, calls_of, prompt_of
from oaiserve.routes.chat.tools import requested_tools
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.intake import parameters
from oaiserve.routes.intake.adaptations import Adaptations
from oaiserve.routes.intake.body_types import ChatBody, TokenizeBody
from oaiserve.routes.intake.invalid import converted, invalid
from oaiserve.routes.intake.media import MediaReader, first_asked
from oaiserve.routes.intake.object_types import Message
from oaiserve.routes.intake.prepare import Intake, prepare
from oaiserve.routes.operation import Operation

_KNOWN = {*Message.__struct_fields__}
_TEMPLATE_PARAMETERS = ("add_generation_prompt", "continue_final_message")
AnyBody = TypeVar("AnyBody", ChatBody, TokenizeBody)


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
    adaptations = intake.exchange.adaptations
    body = with_template_parameters(intake.body, adaptations)
    dialect = intake.serving.dialect
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
    prompt = build_prompt(body, body.messages, dialect, conversation.shown_tools, intake.media, adaptations)
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
    return intake.answer(conversation.continuing(params, prompt), (prompt,), shape)


def with_template_parameters(body: AnyBody, adaptations: Adaptations) -> AnyBody:
    """Return a body without those variables of the template that repeat a parameter."""
    kwargs = body.chat_template_kwargs or {}
    moved = {
        name: kwargs[name] for name in _TEMPLATE_PARAMETERS if name in kwargs and isinstance(kwargs[name], bool | None)
    }
    for name, value in moved.items():
        if getattr(body, name) not in (None, value):
            raise invalid("chat_template_kwargs", f"'{name}' contradicts the parameter of the same name")
    if body.tools and "tools" in kwargs:
        adaptations.note("chat_template_kwargs", "tools are left out, as the request has the parameter of that name")
    rest = {name: value for name, value in kwargs.items() if name not in moved}
    if moved:
        return msgspec.structs.replace(body, chat_template_kwargs=rest, **moved)
    return body


def build_prompt(
    body: ChatBody | TokenizeBody,
    messages: Sequence[Mapping[str, Any]],
    dialect: Dialect,
    shown: Sequence[Mapping[str, Any]],
    media: MediaReader,
    adaptations: Adaptations,
) -> ChatPrompt:
    if not messages:
        raise invalid("messages", "must hold at least one message")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise invalid("continue_final_message", "must not be true together with 'add_generation_prompt'")
    return prompt_of(
        _messages(messages, ContentReader(media, adaptations, "messages"), adaptations),
        shown,
        dialect,
        media,
        adaptations,
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


def _readable(message: Mapping[str, Any], where: str, adaptations: Adaptations) -> Mapping[str, Any]:
    """Return a message whose fields have the types of `Message`, even if other servers' messages have different
    ones."""
    changed: dict[str, Any] = {}
    names = ("content", "tool_call_id") if message.get("role") in ("tool", "function") else ()
    for name in names:
        if isinstance(value := message.get(name), int | float):
            changed[name] = msgspec.json.encode(value).decode()
            adaptations.note(f"{where}.{name}", "is read as a text in JSON")
    for name in ("reasoning", "reasoning_content"):
        if isinstance(value := message.get(name), dict | list):
            changed[name] = text_of(value)
            adaptations.note(f"{where}.{name}", "is read by its text")
    calls = message.get("tool_calls")
    if isinstance(calls, list) and None in calls:
        changed["tool_calls"] = [call for call in calls if call is not None]
        adaptations.note(f"{where}.tool_calls", "null is left out")
    return {**message, **changed}


def _messages(
    raw_messages: Sequence[Mapping[str, Any]], reader: ContentReader, adaptations: Adaptations
) -> list[Placed]:
    raw_messages = [_readable(each, f"messages[{number}]", adaptations) for number, each in enumerate(raw_messages)]
    messages = [converted(Message, each, f"messages[{number}]") for number, each in enumerate(raw_messages)]
    first_question = first_asked([message.role for message in messages])
    placed: list[Placed] = []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.function_call is None:
            older = []
        else:
            older = [{"function": message.function_call}]
        calls = calls_of([*(message.tool_calls or []), *older])
        if calls and message.role != "assistant":
            adaptations.note(where, "calls in a message that is not the assistant's are left out")
            calls = []
        if message.reasoning is None:
            reasoning = message.reasoning_content
        else:
            reasoning = message.reasoning
        if message.role == "assistant":
            reasoning = reasoning or thoughts_in(message.content) or reasoning
            if message.content is None and not (calls or reasoning) and message.refusal is None:
                adaptations.note(where, "a message without anything is left out")
                continue
        role = "tool" if message.role == "function" else message.role
        content: Any = message.refusal or ""
        if message.content is not None or role != "assistant":
            is_asked = role in ("system", "developer") or (role == "user" and number >= first_question)
            content = reader.read(message.content, f"{where}.content", role, is_asked=is_asked)
        known: dict[str, Any] = {"role": role, "content": content, "name": message.name, "tool_calls": calls or None}
        if role == "tool":
            known["tool_call_id"] = message.tool_call_id
        if role == "assistant":
            known["reasoning"] = reasoning
        more = reader.more_fields(raw_messages[number], _KNOWN, where)
        if not isinstance(more.get("thinking", ""), str):  # Templates take this for reasoning.
            del more["thinking"]
        placed.append((where, {name: value for name, value in (known | more).items() if value is not None}))
    if not placed:
        raise invalid("messages", "must hold at least one message with a content")
    return placed
