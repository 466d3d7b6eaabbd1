"""Finds out which engine a server is, from its answers to a few questions. No answer is required."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from oaiserve.plugins.gateway.engines.reading import at, count_of
from oaiserve.plugins.gateway.sources import UNREADABLE

UNKNOWN = "unknown"
OAISERVE = "oaiserve"
LLAMA_CPP = "llama.cpp"
VLLM = "vllm"
SGLANG = "sglang"
OLLAMA = "ollama"
# An engine is known by the owner of its models, or by what the names of its metrics begin with.
_BY_OWNER = {OAISERVE: OAISERVE, SGLANG: SGLANG, VLLM: VLLM, "llamacpp": LLAMA_CPP}
_BY_METRICS = {b"vllm:": VLLM, b"sglang:": SGLANG, b"sglang_": SGLANG, b"llamacpp:": LLAMA_CPP}
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
        parts = [f"{kind} {self.version}".strip(), ", ".join(self.models[:3]) or "which lists no models yet"]
        parts.append(f"{self.context_tokens:,} tokens of context" if self.context_tokens else "")
        return ", ".join(filter(None, parts))


async def identify(get: Get) -> Identity:
    """Find out which engine this is, and its models."""

    async def ask(path: str, *names: str) -> Any:
        """Return a value of the object that the engine sends for a path, or None."""
        try:
            return at(msgspec.json.decode(await get(path) or b"null"), *names)
        except UNREADABLE:
            return None

    async def list_of(path: str, name: str) -> list[Mapping[str, Any]]:
        listed = await ask(path, name)
        return [row for row in listed[:MOST_MODELS] if isinstance(row, Mapping)] if isinstance(listed, list) else []

    rows = await list_of("/v1/models", "data")
    models = tuple(name[:MOST_NAME_CHARACTERS] for row in rows if isinstance(name := row.get("id"), str) and name)
    metrics = await get("/metrics") or b""
    first = rows[0] if rows else {}
    owner = first.get("owned_by")
    context = count_of(first.get("max_model_len")) or count_of(at(first, "meta", "n_ctx_train"))
    of_metrics = (kind for begin, kind in _BY_METRICS.items() if begin in metrics)
    kind = _BY_OWNER.get(str(owner)) or next(of_metrics, UNKNOWN)
    version = ""
    props = await ask("/props") if kind in (LLAMA_CPP, UNKNOWN) else None
    if (slots := at(props, "default_generation_settings")) is not None:
        kind = LLAMA_CPP
        version = _text(at(props, "build_info"))
        context = count_of(at(slots, "n_ctx")) or context
    elif kind == SGLANG:
        info = await ask("/get_server_info") or await ask("/server_info")
        version = _text(at(info, "version"))
        context = context or count_of(at(info, "context_length"))
    elif kind == UNKNOWN and (told := _text(await ask("/api/version", "version"))):
        kind = OLLAMA
        version = told
        loaded = [row for row in await list_of("/api/ps", "models") if row.get("name") in models[:1]]
        context = next((count_of(row.get("context_length")) for row in loaded), None)
    if not version and kind != LLAMA_CPP:
        version = _text(await ask("/version", "version"))
    return Identity(kind, version, models, context, has_metrics=b"# TYPE" in metrics)


def _text(value: Any) -> str:
    return value[:64] if isinstance(value, str) and value.isprintable() else ""
