"""/v1/chat/completions: messages, limits and shapes of the chat route."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.request import ChatPrompt, PromptDone, Request, TokenChunk, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.routes import protocol
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.protocol import ChatBody, Message, TokenizeBody, Wanted, integer, invalid
from oaiserve.routes.respond import Answer, off_loop_if_large, read_body
from oaiserve.routes.serving import Serving, serving_of
from oaiserve.routes.shapes import (
    ChunkFrame,
    Head,
    Timings,
    chat_logprobs,
    encode,
    prompt_logprobs_object,
    usage_object,
)

_decoder = msgspec.json.Decoder(ChatBody)


async def chat_completions(http: HTTPRequest) -> Answer:
    serving = serving_of(http)
    exchange: Exchange = http.state.exchange
    content = await read_body(http, serving)
    return await off_loop_if_large(content, lambda: _answer(content, serving, exchange))


def _answer(content: bytes, serving: Serving, exchange: Exchange) -> Answer:
    body = protocol.parse(_decoder, content, serving.unknown_names)
    exchange.is_streaming = bool(body.stream)
    serving.check_model(body.model)

    num_logprobs = _num_logprobs(body)
    num_prompt_logprobs = protocol.prompt_logprobs(body)
    params = protocol.sampling_params(
        body,
        serving.engine.default_params,
        max_tokens=_max_tokens(body),
        logprobs=num_logprobs,
        prompt_logprobs=num_prompt_logprobs,
    )
    exchange.params = protocol.recorded_params(body, params)
    prompt = build_prompt(body, body.messages)
    exchange.prompt_text = protocol.traced_prompts((prompt,), serving.trace_prompt_characters)
    response_id = exchange.response_id = f"chatcmpl-{exchange.unique_id}"
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = Head(response_id, kind, int(time.time()), serving.model_name, serving.fingerprint)
    shape = ChatShape(head, protocol.wanted(body, params, num_logprobs, num_prompt_logprobs))
    request = Request(
        response_id,
        (prompt,),
        params,
        priority=protocol.priority(body),
        cache_salt=protocol.cache_salt(body),
        stream_interval=protocol.stream_interval(body, serving.stream_interval),
        times=exchange.times,
        account=exchange.account,
    )
    return Answer(serving, exchange, request, shape, stream=bool(body.stream))


def _num_logprobs(body: ChatBody) -> int | None:
    num_top = integer(body, "top_logprobs", 0, protocol.MAX_LOGPROBS)
    if body.logprobs:
        return num_top or 0
    if num_top:
        raise invalid("top_logprobs", "is only allowed with 'logprobs': true")
    return None


def _max_tokens(body: ChatBody) -> int | None:
    """None: the rest of the context."""
    older = integer(body, "max_tokens", 1, protocol.MAX_INT32)
    newer = integer(body, "max_completion_tokens", 1, protocol.MAX_INT32)
    return older if newer is None else newer


def build_prompt(body: ChatBody | TokenizeBody, messages: Sequence[Message]) -> ChatPrompt:
    if not messages:
        raise invalid("messages", "must hold at least one message")
    continue_final = bool(body.continue_final_message)
    if continue_final and body.add_generation_prompt:
        raise invalid("continue_final_message", "must not be true together with 'add_generation_prompt'")
    return ChatPrompt(
        [_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        add_generation_prompt=not continue_final and body.add_generation_prompt is not False,
        continue_final_message=continue_final,
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )


_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PASSED_ON = ("name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")


def _message(where: str, message: Message) -> Mapping[str, Any]:
    if message.role not in _ROLES:
        roles = ", ".join(_ROLES)
        raise _invalid_message(f"{where}.role", f"must be one of {roles}, got {protocol.show(message.role)}")
    if message.role == "tool" and message.tool_call_id is None:
        raise _invalid_message(f"{where}.tool_call_id", "is required for the role 'tool'")
    if message.role == "function" and message.name is None:
        raise _invalid_message(f"{where}.name", "is required for the role 'function'")
    passed_on = {name: value for name in _PASSED_ON if (value := getattr(message, name)) is not None}
    if message.function_call is not None:
        passed_on.setdefault("tool_calls", [{"type": "function", "function": message.function_call}])
    return {"role": message.role, "content": _content(where, message), **passed_on}


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


class ChatShape:
    """Choices of /v1/chat/completions, streamed or whole."""

    def __init__(self, head: Head, wanted: Wanted) -> None:
        self._head = head
        self._wanted = wanted
        self._frame = ChunkFrame(head, wanted)

    def prompt(self, event: PromptDone) -> bytes:
        """The role, once per choice and in the order of the choices: the SDK adds up what it gets."""
        self._frame.usage.prompt_tokens += len(event.token_ids)
        parts = []
        for index in range(self._wanted.n):
            ids = self._wanted.with_token_ids and index == 0
            top_level = b',"prompt_token_ids":' + encode(list(event.token_ids)) if ids else b""
            choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            parts.append(self._frame.chunk(choice % index, top_level))
        return b"".join(parts)

    def delta(self, chunk: TokenChunk) -> bytes:
        self._frame.usage.completion_tokens += len(chunk.token_ids)
        event = b""
        if chunk.text or chunk.logprobs or (self._wanted.with_token_ids and chunk.token_ids):
            ids = b',"token_ids":' + encode(chunk.token_ids) if self._wanted.with_token_ids else b""
            logprobs = encode(self._logprobs(chunk)) if chunk.logprobs else b"null"
            choice = b'{"index":%d,"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b}'
            event = self._frame.chunk(choice % (chunk.index, encode(chunk.text), logprobs, ids))
        if chunk.finish_reason is not None:
            # A chunk of its own: clients drop the text of a chunk that has a finish reason.
            choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            end = (chunk.index, encode(chunk.finish_reason), encode(chunk.stop_reason))
            event += self._frame.chunk(choice % end)
        return event

    def closing(self, usage: Usage, timings: Timings) -> bytes:
        return self._frame.closing(usage, timings)

    def whole(self, prompts: list[PromptDone], choices: list[TokenChunk], usage: Usage) -> dict[str, Any]:
        answer = self._head.fields() | {
            "choices": [self._choice(chunk) for chunk in choices],
            "usage": usage_object(usage),
        }
        if self._wanted.num_prompt_logprobs is not None:
            tokens = prompts[0].logprobs or []
            answer["prompt_logprobs"] = prompt_logprobs_object(tokens, self._wanted.num_prompt_logprobs)
        if self._wanted.with_token_ids:
            answer["prompt_token_ids"] = list(prompts[0].token_ids)
        return answer

    def _choice(self, chunk: TokenChunk) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": chunk.index,
            "message": {"role": "assistant", "content": chunk.text, "refusal": None},
            "logprobs": self._logprobs(chunk),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        if self._wanted.with_token_ids:
            choice["token_ids"] = chunk.token_ids
        return choice

    def _logprobs(self, chunk: TokenChunk) -> dict[str, Any] | None:
        if self._wanted.num_logprobs is None:
            return None
        return chat_logprobs(chunk.logprobs or [], self._wanted.num_logprobs, self._wanted.as_token_ids)
