"""/v1/chat/completions: its messages, its own parameters, and the shape of its answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request as HTTPRequest

from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.request import ChatPrompt, PromptDone, TokenChunk, Usage
from oaiserve.errors import InvalidRequest
from oaiserve.routes import protocol
from oaiserve.routes.logprobs import chat_logprobs, chat_logprobs_in_parts, prompt_logprobs_in_parts
from oaiserve.routes.prepare import OwnParams, prepare
from oaiserve.routes.protocol import ChatBody, Message, TokenizeBody, integer, invalid
from oaiserve.routes.respond import Answer
from oaiserve.routes.shapes import HOLE, ChoicesShape, encode, filled

_decoder = msgspec.json.Decoder(ChatBody)


async def chat_completions(http: HTTPRequest) -> Answer:
    return await prepare(
        http,
        _decoder,
        id_prefix="chatcmpl-",
        own_params=lambda body: OwnParams(protocol.max_tokens(body, least=1), _num_logprobs(body)),
        prompts=lambda body: (build_prompt(body, body.messages),),
        shape=lambda body, head, wanted: ChatShape(
            "chat.completion.chunk" if body.stream else "chat.completion", head, wanted
        ),
    )


def _num_logprobs(body: ChatBody) -> int | None:
    num_top = integer(body, "top_logprobs", 0, protocol.MAX_LOGPROBS)
    if body.logprobs:
        return num_top or 0
    if num_top:
        raise invalid("top_logprobs", "is only allowed with 'logprobs': true")
    return None


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


class ChatMessage(msgspec.Struct):
    """The message of a whole answer, or what a chunk adds to it. A field that is UNSET is left out."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: str | UnsetType | None = UNSET


class ChatChoice(msgspec.Struct):
    """A choice, which has a `message` in a whole answer and a `delta` in a chunk."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: dict[str, Any] | msgspec.Raw | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatShape(ChoicesShape):
    """Renders the answers of /v1/chat/completions."""

    def prompt(self, event: PromptDone) -> Iterator[bytes]:
        """Render the role of each choice, once and in the order of the choices, because the SDK concatenates what it
        gets."""
        self._usage.prompt_tokens += len(event.token_ids)
        choices = [ChatChoice(index, delta=ChatMessage("assistant", "")) for index in range(self._wanted.n)]
        if self._wanted.with_token_ids:
            first, *choices = choices
            yield self._chunk_event((first,), prompt_token_ids=list(event.token_ids))
        yield from map(self._event, choices)

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        (prompt,), wanted = prompts, self._wanted
        more: dict[str, Any] = {}
        after: list[Iterable[bytes]] = []
        if wanted.num_prompt_logprobs is not None:
            more["prompt_logprobs"] = HOLE
            after.append(prompt_logprobs_in_parts(prompt.logprobs or TokenLogprobs(), wanted.num_prompt_logprobs))
        if wanted.with_token_ids:
            more["prompt_token_ids"] = list(prompt.token_ids)
        return self._whole(map(self._whole_choice, choices), usage, *after, **more)

    def _whole_choice(self, chunk: TokenChunk) -> Iterator[bytes]:
        message, wanted = ChatMessage("assistant", chunk.text, None), self._wanted
        choice = ChatChoice(chunk.index, message, UNSET, None, chunk.finish_reason, chunk.stop_reason)
        if wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        if wanted.num_logprobs is None:
            return filled(encode(choice))
        choice.logprobs = HOLE
        logprobs = chunk.logprobs or TokenLogprobs()
        return filled(encode(choice), chat_logprobs_in_parts(logprobs, wanted.num_logprobs, wanted.as_token_ids))

    def _text_choice(self, chunk: TokenChunk) -> ChatChoice:
        choice = ChatChoice(chunk.index, UNSET, ChatMessage(UNSET, chunk.text))
        if chunk.logprobs and self._wanted.num_logprobs is not None:
            choice.logprobs = chat_logprobs(chunk.logprobs, self._wanted.num_logprobs, self._wanted.as_token_ids)
        if self._wanted.with_token_ids:
            choice.token_ids = chunk.token_ids
        return choice

    def _end_choice(self, chunk: TokenChunk) -> ChatChoice:
        return ChatChoice(chunk.index, UNSET, ChatMessage(), None, chunk.finish_reason, chunk.stop_reason)
