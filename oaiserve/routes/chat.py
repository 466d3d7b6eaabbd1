"""/v1/chat/completions: its messages and its own parameters, tools and reasoning among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt, Grammar
from oaiserve.errors import InvalidRequest
from oaiserve.record import ToolCallOutcome
from oaiserve.routes import protocol
from oaiserve.routes.chat_shape import ChatCompletion, ChatCompletionChunk, ChatShape
from oaiserve.routes.constraints import is_constrained
from oaiserve.routes.operation import Operation, documented
from oaiserve.routes.parse.forms import AnswerForms
from oaiserve.routes.parse.reasoning import ReasoningMode
from oaiserve.routes.parsed_shape import ParsedChatShape
from oaiserve.routes.prepare import OwnParams, prepare
from oaiserve.routes.protocol import ChatBody, Message, TokenizeBody, Wanted, integer, invalid
from oaiserve.routes.respond import Answer
from oaiserve.routes.serving import serving_of
from oaiserve.routes.shapes import Head
from oaiserve.routes.tool_prompt import with_tools
from oaiserve.routes.tools import Tools, forced_schema, requested_tools

_decoder = msgspec.json.Decoder(ChatBody)
ANY_OBJECT = {"type": "object"}


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
    """The tools and the reasoning of one request, which its parameters, its prompt and its answer share."""

    def __init__(self, forms: AnswerForms, counted_calls: dict[ToolCallOutcome, int]) -> None:
        self._forms = forms
        self._counted_calls = counted_calls
        self._tools: Tools | None = None
        self._reasoning: ReasoningMode | None = None
        self._template_kwargs: dict[str, Any] = {}

    def own_params(self, body: ChatBody) -> OwnParams:
        """Return the parameters, and find out what the others need. So this is called first."""
        tools, forms = requested_tools(body), self._forms
        if tools is not None and tools.is_forced and forms.calls is None:
            param = "function_call" if tools.is_legacy else "tool_choice"
            raise invalid(param, "this server does not read calls (--tool-call-parser none), so none can be forced")
        given_kwargs = body.chat_template_kwargs or {}
        effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
        self._tools, self._template_kwargs = tools, {**effort, **given_kwargs}
        if forms.reasoning is not None:
            self._reasoning = forms.reasoning.of_request(
                self._template_kwargs,
                is_asked_for=body.add_generation_prompt is not False and not body.continue_final_message,
                must_end=bool(body.stop) or is_constrained(body) or (tools is not None and tools.is_forced),
            )
        reasoning_format = "auto" if body.reasoning_format is None else body.reasoning_format
        if reasoning_format not in protocol.REASONING_FORMATS:
            allowed = ", ".join(map(repr, protocol.REASONING_FORMATS))
            raise invalid("reasoning_format", f"must be one of {allowed}, got {protocol.show(reasoning_format)}")
        self._reads_reasoning = self._reasoning is not None and reasoning_format != "none"
        return OwnParams(
            protocol.max_tokens(body),
            _num_logprobs(body),
            grammar=self._forced_calls(),
            or_calls=self._or_calls,
            answer_begins_after="" if self._reasoning is None else self._reasoning.ends_with,
            visible_special_ids=forms.visible_ids(calls=tools is not None, reasoning=self._reads_reasoning),
            text_lengths=self._reads_reasoning,
        )

    def _forced_calls(self) -> Grammar | None:
        tools, family = self._tools, self._forms.calls
        if tools is None or not tools.is_forced or family is None:
            return None
        schemas = {name: forced_schema(schema) for name, schema in tools.schemas.items()}
        text = family.grammar(schemas, only_one=tools.only_one, special_ids=self._forms.special_ids)
        return Grammar("lark_with_schemas", text, param="functions" if tools.is_legacy else "tools")

    def _or_calls(self, constraint: Grammar) -> Grammar:
        """Return a constraint under which the model may also call tools instead, if it is one on JSON.

        Otherwise the model could never call a tool. The arguments are any object, as without a constraint.
        """
        tools, family = self._tools, self._forms.calls
        if tools is None or family is None or constraint.kind not in ("json_object", "json_schema"):
            return constraint
        text = family.grammar(
            dict.fromkeys(tools.schemas, ANY_OBJECT),
            only_one=tools.only_one,
            special_ids=self._forms.special_ids,
            answer=constraint.text if constraint.kind == "json_schema" else msgspec.json.encode(ANY_OBJECT).decode(),
        )
        return replace(constraint, kind="lark_with_schemas", text=text)

    def prompts(self, body: ChatBody) -> tuple[ChatPrompt]:
        prompt = build_prompt(body, body.messages, self._forms, () if self._tools is None else self._tools.shown)
        opening = "" if self._reasoning is None else self._reasoning.prompt_opening
        return (replace(prompt, template_kwargs=self._template_kwargs, opening=opening),)

    def shape(self, body: ChatBody, head: Head, wanted: Wanted) -> ChatShape:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        reads_calls = self._tools is not None and self._forms.calls is not None
        if not reads_calls and not self._reads_reasoning:
            return ChatShape(kind, head, wanted)
        return ParsedChatShape(
            kind,
            head,
            wanted,
            family=self._forms.calls,
            tools=self._tools,
            reasoning=self._reasoning if self._reads_reasoning else None,
            shows_reasoning=body.include_reasoning is not False,
            counted_calls=self._counted_calls,
        )


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
    return ChatPrompt(
        with_tools(checked, shown, forms),
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
        tools=shown if forms.template_takes_tools else (),
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
