"""Finds out which engine a server is, from its answers to a few questions. No answer is required."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from oaiserve.plugins.gateway.sources import UNREADABLE

UNKNOWN = "unknown"
OAISERVE = "oaiserve"
LLAMA_CPP = "llama.cpp"
VLLM = "vllm"
SGLANG = "sglang"
OLLAMA = "ollama"
MOST_MODELS = 256
MOST_NAME_CHARACTERS = 256

Get = Callable[[str], Awaitable[bytes | None]]  # Returns the body of a 200 for a path, or None.


class Identity(NamedTuple):
    """What an engine says about itself."""

    kind: str = UNKNOWN
    version: str = ""
    models: tuple[str, ...] = ()
    context_tokens: int | None = None  # the longest prompt and answer of its first model
    has_metrics: bool = False

    @property
    def shown(self) -> str:
        """Return the engine for people: its kind, version, models and context."""
        kind = "an engine of an unknown kind" if self.kind == UNKNOWN else self.kind
        parts = [f"{kind} {self.version}".strip(), ", ".join(self.models[:3])]
        parts.append(f"{self.context_tokens:,} tokens of context" if self.context_tokens else "")
        return ", ".join(filter(None, parts))


async def identify(get: Get) -> Identity:
    """Ask an engine what it is."""
    listed = _json(await get("/v1/models"))
    rows = [row for row in _list(_at(listed, "data"))[:MOST_MODELS] if isinstance(row, Mapping)]
    models = tuple(name[:MOST_NAME_CHARACTERS] for row in rows if isinstance(name := row.get("id"), str) and name)
    metrics = await get("/metrics") or b""
    owner = _at(rows[0], "owned_by") if rows else None
    first = rows[0] if rows else {}
    context = _number(first.get("max_model_len")) or _number(_at(first, "meta", "n_ctx_train"))
    kind = UNKNOWN
    version = ""
    if owner in (OAISERVE, SGLANG, VLLM):
        kind = str(owner)
    elif b"vllm:" in metrics:
        kind = VLLM
    elif b"sglang:" in metrics or b"sglang_" in metrics:
        kind = SGLANG
    elif b"llamacpp:" in metrics or owner == "llamacpp":
        kind = LLAMA_CPP
    props = None if kind in (VLLM, OAISERVE, SGLANG) else _json(await get("/props"))
    if kind in (LLAMA_CPP, UNKNOWN) and (slots := _at(props, "default_generation_settings")) is not None:
        kind = LLAMA_CPP
        version = _text(_at(props, "build_info"))
        context = _number(_at(slots, "n_ctx")) or context
    elif kind == SGLANG:
        info = _json(await get("/get_server_info")) or _json(await get("/server_info"))
        version = _text(_at(info, "version"))
        context = context or _number(_at(info, "context_length"))
    elif kind == UNKNOWN and (told := _text(_at(_json(await get("/api/version")), "version"))):
        kind = OLLAMA
        version = told
    if not version and kind != LLAMA_CPP:
        version = _text(_at(_json(await get("/version")), "version"))
    return Identity(kind, version, models, context, has_metrics=b"# TYPE" in metrics)


def _json(content: bytes | None) -> Any:
    if content is None:
        return None
    try:
        return msgspec.json.decode(content)
    except UNREADABLE:
        return None


def _at(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < 2**40 else None


def _text(value: Any) -> str:
    return value[:64] if isinstance(value, str) and value.isprintable() else ""
