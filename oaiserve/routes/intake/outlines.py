"""Makes the `Outline` of a prompt: hashes and sizes of the parts that a client sent, for comparing prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt, Prompt, Request
from oaiserve.explain.reuse.outline import Outline, Part, part_of
from oaiserve.wire.prefix_keys import MEDIUM_BYTES, SYSTEM_ROLES

TOLD_RESULT = "<tool_response>\n"  # begins the result of a tool that the template can only show as a user's turn
MAX_OPTIONS = 64
MAX_OPTION_CHARACTERS = 64

_encoder = msgspec.json.Encoder(enc_hook=repr)


def outline_of(request: Request, prompt: Prompt) -> Outline:
    """Return the outline of one prompt of a request."""
    model = request.origin.model
    salt = part_of(request.cache_salt.encode())
    if not isinstance(prompt, ChatPrompt):
        return Outline(model, salt, messages=(_part(prompt),))
    messages = prompt.messages
    num_system = _num_system(messages)
    return Outline(
        model,
        salt,
        _parts(prompt.tools or prompt.told_tools),
        _messages(messages[:num_system]),
        _options(prompt.template_kwargs),
        _messages(messages[num_system:]),
        tuple(part_of(_bytes(file.content))._replace(size=MEDIUM_BYTES) for file in prompt.media),
        part_of(prompt.opening.encode()),
    )


def _options(kwargs: Mapping[str, Any]) -> dict[str, Part]:
    """Return the options by name, or as one part if there are many or their names are long, because outlines are
    kept."""
    if len(kwargs) <= MAX_OPTIONS and all(len(name) <= MAX_OPTION_CHARACTERS for name in kwargs):
        return {name: _part(value) for name, value in kwargs.items()}
    return {"chat_template_kwargs": _part(kwargs)}


def _num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    for number, message in enumerate(messages):
        if message.get("role") not in SYSTEM_ROLES:
            return number
    return len(messages)


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _parts(parts: Iterable[object]) -> tuple[Part, ...]:
    return tuple(map(_part, parts))


def _messages(messages: Iterable[Mapping[str, Any]]) -> tuple[Part, ...]:
    return tuple(part_of(_encoder.encode(message), _role_of(message)) for message in messages)


def _role_of(message: Mapping[str, Any]) -> str:
    """Return the role of a message: "tool" also for a tool's result that had to be written as a user's turn."""
    content = message.get("content")
    is_result = isinstance(content, str) and content.startswith(TOLD_RESULT)
    return "tool" if is_result else str(message.get("role", ""))


def _part(part: object) -> Part:
    return part_of(_encoder.encode(part))
