"""The bodies of OpenAI's routes for those of Ollama's. This file knows nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.plugins.ollama.body import (
    AskBody,
    EmbedTextBody,
    EmbedTextsBody,
    GenerateBody,
    KeepAlive,
    OllamaChatBody,
    OllamaMessage,
)
from oaiserve.plugins.ollama.options import sampling_of
from oaiserve.routes.adaptations import Note
from oaiserve.routes.dialects.reasoning import SWITCHES
from oaiserve.routes.intake.invalid import invalid, show

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
LATEST = ":latest"
_REASONING_ON = {name: on for name, (_, on) in SWITCHES.items()}
_NO_IMAGES = "is not supported here: models of this server generate text"


class Inner(NamedTuple):
    """A request to one of OpenAI's routes."""

    path: str
    body: dict[str, Any]
    # The body for a model without a chat template, which continues a prompt.
    plain: dict[str, Any] | None = None

    def named(self, model: str) -> Inner:
        """Return the request with another name of the model."""
        plain = None if self.plain is None else {**self.plain, "model": model}
        return Inner(self.path, {**self.body, "model": model}, plain)


def chat_request(body: OllamaChatBody, note: Note) -> Inner:
    """Return the request for a conversation that has messages. Raises InvalidRequest."""
    tools = [{"type": "function", **tool} for tool in body.tools or []]
    messages = _messages(body.messages or [])
    return Inner(
        CHAT, {**_shared(body, note), **_of_chat(body), "messages": messages, **({"tools": tools} if tools else {})}
    )


def generate_request(body: GenerateBody, note: Note) -> Inner:
    """Return the request for a prompt: of chat, or of a completion if it is raw or has a suffix. Raises
    InvalidRequest."""
    for name, advice in (
        ("template", "the model's own chat template is used. Send 'raw': true with a prompt of your own form"),
        ("context", "please send the messages so far to /api/chat"),
    ):
        if getattr(body, name):
            raise InvalidRequest(f"'{name}' is not supported here: {advice}.", param=name)
    for name in ("width", "height", "steps"):
        if getattr(body, name):
            raise InvalidRequest(f"'{name}' {_NO_IMAGES}.", param=name)
    shared = _shared(body, note)
    prompt = body.prompt or ""
    if body.raw or body.suffix:
        if body.images:
            raise invalid("images", "are only allowed without 'raw' and 'suffix'")
        for name in ("system", "think", "logprobs"):
            if getattr(body, name):
                note(name, "is left out: the prompt is continued as it is")
        return Inner(COMPLETIONS, _completion(shared, prompt, body.suffix))
    system = body.system or ""
    turns = [OllamaMessage(role="user", content=prompt, images=body.images)]
    if system:
        turns.insert(0, OllamaMessage(role="system", content=system))
    plain = None if body.images else _completion(shared, "\n\n".join(filter(None, (system, prompt))))
    return Inner(CHAT, {**shared, **_of_chat(body), "messages": _messages(turns)}, plain)


def embed_request(body: EmbedTextsBody, note: Note) -> Inner:
    sampling_of(body.options, note)
    _note_keep_alive(body.keep_alive, note)
    more: dict[str, Any] = {} if body.truncate is False else {"truncate_prompt_tokens": -1}
    if body.dimensions is not None:
        more["dimensions"] = body.dimensions
    return Inner(EMBEDDINGS, {"model": body.model, "input": body.input, **more})


def older_embed_request(body: EmbedTextBody, note: Note) -> Inner:
    """Return the request of /api/embeddings, whose vectors keep their lengths."""
    sampling_of(body.options, note)
    _note_keep_alive(body.keep_alive, note)
    more = {"truncate_prompt_tokens": -1, "normalize": False}
    return Inner(EMBEDDINGS, {"model": body.model, "input": body.prompt, **more})


def _note_keep_alive(value: KeepAlive, note: Note) -> None:
    """Note a time after which the model should be unloaded. Negative ones wish for none."""
    if value is not None and not str(value).startswith("-"):
        note("keep_alive", "is left out: the model stays loaded")


def is_zero(keep_alive: KeepAlive) -> bool:
    """Return whether the model should be unloaded at once."""
    return keep_alive is not None and str(keep_alive).rstrip("hmsnuµ") in ("0", "0.0")


def _shared(body: AskBody, note: Note) -> dict[str, Any]:
    _note_keep_alive(body.keep_alive, note)
    for name in ("truncate", "shift"):
        if getattr(body, name):
            note(name, "is left out: a prompt that is too long is refused")
    parameters = {"model": body.model, **sampling_of(body.options, note)}
    if body.format == "json":
        parameters["response_format"] = {"type": "json_object"}
    elif isinstance(body.format, dict):
        # Ollama ignores what its grammars cannot enforce. Here such keywords are named.
        schema = {"name": "format", "schema": body.format, "strict": False}
        parameters["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format:
        raise invalid("format", f"must be 'json' or a JSON Schema, got {show(body.format)}")
    if body.stream is not False:
        parameters |= {"stream": True, "stream_options": {"include_usage": True, "include_timings": True}}
    return parameters


def _of_chat(body: AskBody) -> dict[str, Any]:
    """Return the parameters that only chat has."""
    parameters: dict[str, Any] = {}
    if body.think is True:
        parameters["chat_template_kwargs"] = _REASONING_ON
    elif body.think is False:
        parameters |= {"reasoning_effort": "none", "include_reasoning": False}
    elif body.think:
        parameters["reasoning_effort"] = body.think
    if body.logprobs:
        parameters |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return parameters


def _completion(shared: dict[str, Any], prompt: str, suffix: str | None = None) -> dict[str, Any]:
    # Completions have a default of 16 tokens, and Ollama's have no limit.
    more = {"suffix": suffix} if suffix else {}
    return {"max_tokens": -1, **shared, "prompt": prompt, **more}


def _messages(turns: Sequence[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of chat. Ollama's results of tools name a function, or follow the order of the calls."""
    messages: list[dict[str, Any]] = []
    waiting: dict[str, str] = {}  # functions of the calls without a result, by the ids of the calls
    for number, turn in enumerate(turns):
        message: dict[str, Any] = {"role": turn.role, "content": _content(turn)}
        if turn.thinking is not None:
            message["reasoning"] = turn.thinking
        if turn.tool_calls:
            calls = {each.id or f"call_{number}_{place}": each for place, each in enumerate(turn.tool_calls)}
            waiting = {call_id: call.function.name for call_id, call in calls.items()}
            message["tool_calls"] = [
                _call(call_id, call.function.name, call.function.arguments) for call_id, call in calls.items()
            ]
        if turn.role == "tool":
            function = turn.tool_name or turn.name
            of_function = [call_id for call_id, name in waiting.items() if name == function]
            answered = turn.tool_call_id or next(iter(of_function or waiting), None)
            waiting.pop(answered or "", None)
            message |= {} if answered is None else {"tool_call_id": answered}
        messages.append(message)
    return messages


def _content(turn: OllamaMessage) -> Any:
    if not turn.images:
        return turn.content or ""
    # The file itself shows its type.
    images = [{"type": "image_url", "image_url": {"url": _data_url(each)}} for each in turn.images]
    return [*images, {"type": "text", "text": turn.content or ""}]


def _data_url(image: str) -> str:
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}
