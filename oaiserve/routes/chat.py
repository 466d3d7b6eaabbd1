"""/v1/chat/completions: its messages and its own parameters, tools and reasoning among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt
from oaiserve.errors import InvalidRequest
from oaiserve.record import ToolCallOutcome
from oaiserve.routes import protocol
from oaiserve.routes.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.constraints import is_constrained
from oaiserve.routes.operation import Operation, documented
from oaiserve.routes.parse.forms import AnswerForms
from oaiserve.routes.parsed_shape import ParsedChatShape
from oaiserve.routes.prepare import OwnParams, prepare
from oaiserve.routes.protocol import ChatBody, Message, TokenizeBody, Wanted, integer, invalid
from oaiserve.routes.respond import Answer
from oaiserve.routes.serving import serving_of
from oaiserve.routes.shapes import Head
from oaiserve.routes.talk import Talk
from oaiserve.routes.tool_prompt import prompt_with_tools
from oaiserve.routes.tools import requested_tools

_decoder = msgspec.json.Decoder(ChatBody)


@documented(
    Operation(
        summary="Answer a conversation, whole or streamed.",
        group="Generation",
        body=ChatBody,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 64},
    )
)
async def chat_completions(http: HTTPRequest) -> Answer:
    chat = _Chat(serving_of(http).forms, http.state.exchange.tool_calls)
    return await prepare(
        http, _decoder, id_prefix="chatcmpl-", own_params=chat.own_params, prompts=chat.prompts, shape=chat.shape
    )


class _Chat:
    """One request to chat: what its parameters, its prompt and its answer share."""

    def __init__(self, forms: AnswerForms, counted_calls: dict[ToolCallOutcome, int]) -> None:
        self._forms = forms
        self._counted_calls = counted_calls
        self._talk: Talk

    def own_params(self, body: ChatBody) -> OwnParams:
        """Return the parameters, and find out what the others need. So this is called first."""
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        self._talk = Talk(
            self._forms,
            requested_tools(body),
            {**effort, **(body.chat_template_kwargs or {})},
            is_constrained=bool(body.stop) or is_constrained(body),
            asks_for_answer=body.add_generation_prompt is not False and not body.continue_final_message,
            shows_marks=_reasoning_format(body) == "none",
        )
        return self._talk.own_params(protocol.max_tokens(body), _num_logprobs(body))

    def prompts(self, body: ChatBody) -> tuple[ChatPrompt]:
        prompt = build_prompt(body, body.messages, self._forms, self._talk.shown_tools)
        return (self._talk.completed(prompt),)

    def shape(self, body: ChatBody, head: Head, wanted: Wanted) -> ChatShape:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        talk = self._talk
        if not talk.reads_calls and not talk.reads_reasoning:
            return ChatShape(kind, head, wanted)
        shows_reasoning = body.include_reasoning is not False
        return ParsedChatShape(kind, head, wanted, talk, self._counted_calls, shows_reasoning=shows_reasoning)


def _reasoning_format(body: ChatBody) -> str:
    name = "auto" if body.reasoning_format is None else body.reasoning_format
    if name not in protocol.REASONING_FORMATS:
        allowed = ", ".join(map(repr, protocol.REASONING_FORMATS))
        raise invalid("reasoning_format", f"must be one of {allowed}, got {protocol.show(name)}")
    return name


def _num_logprobs(body: ChatBody) -> int | None:
    num_top = integer(body, "top_logprobs")
    if body.logprobs:
        return num_top or 0
    if num_top:
        raise invalid("top_logprobs", "is only allowed with 'logprobs': true")
    return None


def build_prompt(
    body: ChatBody | TokenizeBody, messages: Sequence[Message], forms: AnswerForms, shown: Sequence[Mapping[str, Any]]
) -> ChatPrompt:
    """Return the prompt of these messages, in which the tools `shown` are described."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise invalid("continue_final_message", "must not be true together with 'add_generation_prompt'")
    checked = [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    return prompt_with_tools(
        checked,
        shown,
        forms,
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


_PASSED_ON = ("name", "tool_call_id")


def _message(where: str, message: Message) -> dict[str, Any]:
    if message.role not in protocol.ROLES:
        roles = ", ".join(protocol.ROLES)
        raise _invalid_message(f"{where}.role", f"must be one of {roles}, got {protocol.show(message.role)}")
    if message.role == "tool" and message.tool_call_id is None:
        raise _invalid_message(f"{where}.tool_call_id", "is required for the role 'tool'")
    if message.role == "function" and message.name is None:
        raise _invalid_message(f"{where}.name", "is required for the role 'function'")
    passed_on: dict[str, Any] = {name: value for name in _PASSED_ON if (value := getattr(message, name)) is not None}
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None:  # templates know it by one name or the other
        passed_on |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        passed_on["tool_calls"] = [_call(f"{where}.tool_calls[{i}]", call) for i, call in calls]
    elif message.function_call is not None:
        call = {"id": _id_of_function(message.function_call.get("name")), "function": message.function_call}
        passed_on["tool_calls"] = [_call(where, call, "function_call")]
    role = message.role
    if role == "function":  # the older form of a tool's result
        role, passed_on["tool_call_id"] = "tool", _id_of_function(message.name)
    return {"role": role, "content": _content(where, message), **passed_on}


def _call(where: str, call: Mapping[str, Any], key: str = "function") -> dict[str, Any]:
    """Return a call of the history, with its arguments as a string."""
    if (kind := call.get("type") or "function") != "function":
        raise _invalid_message(f"{where}.type", f"must be 'function', got {protocol.show(kind)}")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _invalid_message(f"{where}.{key}", "must be an object with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = msgspec.json.encode(arguments).decode()
    if not isinstance(arguments, str | None):
        raise _invalid_message(f"{where}.{key}.arguments", f"must be a string, got {protocol.show(arguments)}")
    identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments or ""}}


def _id_of_function(name: str | None) -> str:
    """Return the id of a call in the older form, in which calls and results are joined by the function's name."""
    return f"call_{name}"


def _content(where: str, message: Message) -> str | list[dict[str, str]]:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant" and message.refusal is not None:
            return message.refusal
        is_optional = message.role == "function" or (
            message.role == "assistant" and (message.tool_calls or message.function_call)
        )
        if not is_optional:
            raise _invalid_message(f"{where}.content", f"is required for the role '{message.role}'")
        return ""
    return [_text_part(f"{where}.content[{i}]", part) for i, part in enumerate(message.content)]


def _text_part(where: str, part: Mapping[str, Any]) -> dict[str, str]:
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        raise _invalid_message(f"{where}.type", f"this server takes text only, got {protocol.show(kind)}")
    text = part.get(kind)
    if not isinstance(text, str):
        raise _invalid_message(f"{where}.{kind}", "must be a string")
    return {"type": "text", "text": text}


def _invalid_message(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{where}': {reason}.", param="messages")
