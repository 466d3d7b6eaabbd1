"""Makes the `Outline` of a prompt: hashes of the parts that a client sent, by which later prompts are compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from oaiserve.engine.request import ChatPrompt, Prompt, Request
from oaiserve.explain.reuse.outline import Digest, Outline, digest_of

_SYSTEM_ROLES = ("system", "developer")
_encoder = msgspec.json.Encoder(enc_hook=repr)


def outline_of(request: Request, prompt: Prompt) -> Outline:
    """Return the outline of one prompt of a request."""
    model = request.origin.model
    salt = digest_of(request.cache_salt.encode())
    if not isinstance(prompt, ChatPrompt):
        return Outline(model, salt, messages=(_digest(prompt),))
    messages = prompt.messages
    num_system = _num_system(messages)
    options = {**prompt.template_kwargs, "opening": prompt.opening}
    return Outline(
        model,
        salt,
        _digests(prompt.tools or prompt.told_tools),
        _digests(messages[:num_system]),
        {name: _digest(value) for name, value in options.items()},
        _digests(messages[num_system:]),
        tuple(digest_of(_bytes(file.content)) for file in prompt.media),
    )


def _num_system(messages: Sequence[Mapping[str, Any]]) -> int:
    for number, message in enumerate(messages):
        if message.get("role") not in _SYSTEM_ROLES:
            return number
    return len(messages)


def _bytes(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _digests(parts: Iterable[object]) -> tuple[Digest, ...]:
    return tuple(map(_digest, parts))


def _digest(part: object) -> Digest:
    return digest_of(_encoder.encode(part))
