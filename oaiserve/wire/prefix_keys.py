"""Prefix keys of a prompt, computed from its text, because a router has no tokens.

The text is cut into blocks. The key of a block is a hash of it and of all blocks before it, as for the blocks of the KV
cache (engine/sequences/blocks.py). So equal keys mean equal prefixes, and most probably the same cached blocks. But
here, a collision can only send a request to a replica that has less of it cached.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from oaiserve.wire.surrogates import without_halves

BLOCK_BYTES = 256
MOST_SURROGATES = 100_000  # maximum escaped surrogates that are checked in a body, so that routing stays fast
# Longer prefixes are not distinguished: prompts with this much in common belong together, and routing takes bounded
# time.
MOST_BLOCKS = 256
BYTES_PER_TOKEN = 4  # an estimate for English text, used only for sizes

# Fields at the beginning of a prompt, in the order in which most chat templates render them, and fields with the text
# that follows. A body has one of the latter.
_FIRST_FIELDS = ("tools", "instructions", "system")
_TEXT_FIELDS = ("messages", "input", "prompt")

_SYSTEM_FIELDS = ("instructions", "system")
SYSTEM_ROLES = ("system", "developer")
_BILLING = re.compile(r"\A\s*x-anthropic-billing-header[^\n]*\s*")

_encode_sorted = msgspec.json.Encoder(order="sorted").encode
_MEDIA_TYPES = ("image_url", "input_image", "image", "input_audio")  # types of parts of messages
MEDIUM_BYTES = 1024  # bytes of the text that stands for an image or a sound: about as many as its tokens
# Clients of Anthropic's API mark the end of the conversation so far, which moves in each turn.
_CACHE_CONTROL = re.compile(rb'"cache_control":(?:\{[^{}]*\}|null),?')


class Prompt(NamedTuple):
    """What a router knows about a prompt."""

    keys: Sequence[int]  # keys of its full blocks
    # Key of its text up to the end of the first user message, the same in all turns of a conversation.
    conversation: int
    num_tokens: int  # estimated
    model: str = ""  # the model's name in the body
    # Deadlines for the first token and for the end, as the body states them.
    deadlines_ms: tuple[int | None, int | None] = (None, None)


def prompt_of_body(content: bytes | bytearray) -> Prompt:
    """Return a router's view of the prompt in a received body, which may be anything.

    The router and the replica both call this, so that they compute the same keys.
    """
    model = ""
    if content.startswith(BOM_UTF8):
        content = content[len(BOM_UTF8) :]
    try:
        body = _decoded(content)
        if isinstance(body, dict):
            return prompt_of(body)
    except msgspec.ValidationError:  # A number is out of range, maybe in a field that the replica ignores.
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            model = _named.decode(content).model
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # The replica refuses it with the reason.
    return prompt_of_text(b"", bytes(content[:BLOCK_BYTES]))._replace(model=model)


class _Named(msgspec.Struct):
    model: str = ""


_named = msgspec.json.Decoder(_Named)


def _decoded(content: bytes | bytearray) -> Any:
    """Decode a body as the replica reads it: halves of surrogate pairs are replaced. Raises the decoder's errors."""
    try:
        return msgspec.json.decode(content)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        readable = bytearray(content)
        for _ in islice(without_halves(readable), MOST_SURROGATES):
            pass
        if readable == content:
            raise
        return msgspec.json.decode(readable)


def prompt_of(body: Mapping[str, Any]) -> Prompt:
    """Return a router's view of the prompt in a body of any generation route.

    Two bodies share keys only if model (or adapter) and `cache_salt` are the same, as with the prefix cache.
    """
    messages: list[Any] = []
    for name in _TEXT_FIELDS:
        text = body.get(name)
        messages += text if isinstance(text, list) else [text] if text else []
    messages = [_without_billing(one) for one in messages]
    body = {**body, **{name: without_billing(body[name]) for name in _SYSTEM_FIELDS if name in body}}
    parts = [_encode(body[name]) for name in _FIRST_FIELDS if body.get(name)] + [
        _encode(_with_short_media(one)) for one in messages
    ]
    users = (at for at, one in enumerate(messages, 1) if isinstance(one, Mapping) and one.get("role") == "user")
    num_first = len(parts) - len(messages) + next(users, len(messages))
    salt = _encode([body.get("model"), body.get("cache_salt")])
    prompt = prompt_of_text(b",".join(parts), salt, len(b",".join(parts[:num_first])))
    first, end = (
        value if type(value := body.get(name)) is int else None for name in ("ttft_deadline_ms", "deadline_ms")
    )
    prompt = prompt._replace(deadlines_ms=(first, end))
    if isinstance(model := body.get("model"), str):
        return prompt._replace(model=model)
    return prompt


def _with_short_media(value: Any) -> Any:
    """Return a message in which a hash replaces each image and sound, whose own text would fill all blocks."""
    if not isinstance(value, dict):
        return value
    if value.get("type") in _MEDIA_TYPES:
        digest = blake2b(_encode(value)).hexdigest()
        return digest * (MEDIUM_BYTES // len(digest))
    lists = {name: parts for name in ("content", "output") if isinstance(parts := value.get(name), list)}
    return {**value, **{name: [*map(_with_short_media, parts)] for name, parts in lists.items()}}


def without_billing(content: Any) -> Any:
    """Return the content of a system message without Claude Code's billing header, its first line.

    The line means nothing to the model and changes with each request, so no two prompts would share a prefix. Gateways
    pass it on as a block or join it with the text after it.
    """
    if isinstance(content, str):
        return _BILLING.sub("", content)
    if not isinstance(content, list):
        return content
    rest_of_parts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        rest = _BILLING.sub("", text) if isinstance(text, str) else text
        if rest or not text:
            rest_of_parts.append(part if rest == text else {**part, "text": rest})
    return rest_of_parts


def _without_billing(message: Any) -> Any:
    is_system = isinstance(message, dict) and message.get("role") in SYSTEM_ROLES and "content" in message
    if is_system:
        return {**message, "content": without_billing(message["content"])}
    return message


def _encode(value: Any) -> bytes:
    return _CACHE_CONTROL.sub(b"", _encode_sorted(value))


def prompt_of_text(text: bytes, salt: bytes = b"", conversation_bytes: int | None = None) -> Prompt:
    """Return the keys and the estimated length by which a router routes a prompt with this text. Prompts with different
    salts have no key in common.

    The first `conversation_bytes` (None: all) are the same in all turns of its conversation."""
    chain = blake2b(blake2b(salt).digest(), digest_size=8)
    keys = []
    end = min(len(text) // BLOCK_BYTES, MOST_BLOCKS) * BLOCK_BYTES
    for start in range(0, end, BLOCK_BYTES):
        chain.update(text[start : start + BLOCK_BYTES])
        keys.append(_number(chain.copy().digest()))
    conversation = blake2b(b"talk" + blake2b(salt).digest(), digest_size=8)
    conversation.update(text[:conversation_bytes][: BLOCK_BYTES * MOST_BLOCKS])
    return Prompt(keys, _number(conversation.digest()), len(text) // BYTES_PER_TOKEN)


def prefix_keys_of(prompt: Prompt) -> tuple[tuple[int, float], ...]:
    """Return the keys under which a replica reports a prompt, each with its share of the whole prompt.

    The share is measured in text, as an estimate of the share in tokens, which only the replica knows.
    """
    num_bytes = max(1, prompt.num_tokens * BYTES_PER_TOKEN)
    return tuple(
        (prompt.keys[depth - 1], min(1.0, depth * BLOCK_BYTES / num_bytes)) for depth in marked_depths(len(prompt.keys))
    )


def key_of_session(session: str) -> int:
    """Return the key of a session, which decides where its requests are placed."""
    return _number(blake2b(session.encode(), digest_size=8).digest())


def marked_depths(num_blocks: int) -> Iterable[int]:
    """Return the prefix lengths, in blocks, at which holders of a prompt of `num_blocks` are noted: at most 28.

    These are the numbers with at most three significant bits (1 to 8, 10, 12, 14, 16, 20, ...), so that the longest
    common prefix of two prompts is known to within a fifth. The prompt's own length is one, too, since the next turn
    continues from there.
    """
    return _MARKED_DEPTHS[min(num_blocks, MOST_BLOCKS)]


def _number(digest: bytes) -> int:
    return int.from_bytes(digest, "little")


_ROUND = [depth for depth in range(1, MOST_BLOCKS + 1) if depth % (1 << max(0, depth.bit_length() - 3)) == 0]
_MARKED_DEPTHS = [
    (*(depth for depth in _ROUND if depth < num_blocks), num_blocks) if num_blocks else ()
    for num_blocks in range(MOST_BLOCKS + 1)
]
