"""Makes the `Outline` of a prompt: hashes and sizes of the parts that a client sent, for comparing prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt, Prompt, Request
from oaiserve.explain.reuse.outline import Outline, Part, part_of
from oaiserve.wire.prefix_keys import SYSTEM_ROLES

_encoder = msgspec.json.Encoder(enc_hook=repr)


def outline_of(request: Request, prompt: Prompt) -> Outline:
    """Return the outline of one prompt of a request."""
    model = request.origin.model
    salt = part_of(request.cache_salt.encode())
    if not isinstance(prompt, ChatPrompt):
        return Outline(model, salt, messages=(_part(prompt),))
    messages = prompt.messages
    num_system = _num_system(messages)
    options = {**prompt.template_kwargs, "opening": prompt.opening}
    return Outline(
        model,
        salt,
        _parts(prompt.tools or prompt.told_tools),
        _parts(messages[:num_system]),
        {name: _part(value) for name, value in options.items()},
        _parts(messages[num_system:]),
        tuple(part_of(_bytes(file.content)) for file in prompt.media),
    )


def _num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    for number, message in enumerate(messages):
        if message.get("role") not in SYSTEM_ROLES:
            return number
    return len(messages)


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _parts(parts: Iterable[object]) -> tuple[Part, ...]:
    return tuple(map(_part, parts))


def _part(part: object) -> Part:
    return part_of(_encoder.encode(part))
