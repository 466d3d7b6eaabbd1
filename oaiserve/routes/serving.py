"""Defines `Serving`, the one value through which routes reach the rest of the server, and its components.

`app` makes it when the event loop runs, and stores it in `app.state.serving`. A gateway in front of engines of other
kinds stores a smaller value there, which is an `AnyServing`, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.requests import Request

from oaiserve.errors import InvalidRequest, ModelNotFound, invalid
from oaiserve.explain.reuse.recent_prompts import RecentPrompts
from oaiserve.runtime import Runtime

if TYPE_CHECKING:
    from oaiserve.config import Config
    from oaiserve.engine.boundary import AnyEngine
    from oaiserve.engine.event_streams import LoopStreams
    from oaiserve.engine.types.adapters import ServedAdapter
    from oaiserve.engine.types.pooling import Task
    from oaiserve.http.fetch import Fetcher
    from oaiserve.http.shared_limit import SharedLimit
    from oaiserve.routes.dialects.dialect import Dialect
    from oaiserve.routes.exchange import Exchange
    from oaiserve.routes.sampling_defaults import SamplingDefaults
    from oaiserve.telemetry import Telemetry

MOST_RECEIVED_BYTES = 256 * 2**20
# Default limits
BODY_BYTES = 8 * 2**20
MEDIA_BODY_BYTES = 32 * 2**20
MOST_FILE_BYTES = 64 * 2**20  # bytes of an uploaded file
# Messages or items of a request. Models with a longer context accept one for each token. Real conversations have
# thousands, and each takes time before its tokens are known.
MOST_MESSAGES = 2**14


_IS_FOR = {
    "generate": "generates text, as by /v1/chat/completions; this route is not for it",
    "embed": "turns texts into vectors, by /v1/embeddings, /v1/score and /v1/rerank; this route is not for it",
    "score": "scores pairs of texts, by /v1/score and /v1/rerank; this route is not for it",
    "transcribe": "turns speech into text, by /v1/audio/transcriptions; this route is not for it",
}
_INSTEAD = {
    "generate": "Start a server with a model that generates text, such as 'oaiserve serve Qwen/Qwen3-0.6B'.",
    "embed": "Start a server with an embedding model, such as 'oaiserve serve BAAI/bge-small-en-v1.5', or with "
    "--task embed if this model is meant for that.",
    "score": "Start a server with a reranker, such as 'oaiserve serve BAAI/bge-reranker-base', or with an embedding "
    "model.",
    "transcribe": "Start a server with a Whisper model, such as 'oaiserve serve openai/whisper-base'.",
}


class AnyReadiness(Protocol):
    @property
    def is_ready(self) -> bool: ...


class AnyServing(Protocol):
    """The part of `Serving` that needs no engine of ours: accounts, lists of requests, metrics and pages use no more
    than this."""

    @property
    def config(self) -> Config: ...
    @property
    def engine(self) -> AnyReadiness: ...
    @property
    def telemetry(self) -> Telemetry: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def exchanges(self) -> dict[str, Exchange]: ...
    @property
    def task(self) -> Task: ...
    @property
    def version(self) -> str: ...
    def name_of(self, adapter: ServedAdapter | None, /) -> str: ...


@dataclass(frozen=True, slots=True)
class Serving:
    config: Config
    engine: AnyEngine  # Its tokenizer blocks, so routes use that only in `run_in_turns`.
    telemetry: Telemetry
    streams: LoopStreams
    model_root: str  # the folder or hub id of the model, from which clients load its tokenizer
    version: str
    kind: str  # Servers of one kind write the same bytes for the same request; "" if there are no such servers.
    created: int  # Unix seconds, as in the API
    received_bytes: SharedLimit  # bytes of the bodies that are being received: a client may send many slowly
    fetcher: Fetcher | None  # fetcher of images and sounds that requests name by URL
    dialect: Dialect  # dialect of calls and reasoning in the model's answers
    sampling: SamplingDefaults
    recent_prompts: RecentPrompts  # later prompts are compared with these
    runtime: Runtime
    adapter_loads: Executor | None  # a thread for loading adapters, so that other routes' threads stay free
    exchanges: dict[str, Exchange] = field(default_factory=dict)  # open requests of this process, by unique id

    @property
    def task(self) -> Task:
        if self.engine.pooling is None:
            return "generate"
        return self.engine.pooling.task

    @property
    def body_limit(self) -> int:
        return self.config.server.body_limit or (MEDIA_BODY_BYTES if self.engine.media else BODY_BYTES)

    def has_others(self, client: str) -> bool:
        return any(exchange.client != client for exchange in self.exchanges.values())

    def check_task(self, *tasks: Task) -> None:
        """Raise InvalidRequest, with the right command, if the model is for none of these tasks."""
        if self.task not in tasks:
            message = f"'{self.config.model_name}' {_IS_FOR[self.task]}. {_INSTEAD[tasks[-1]]}"
            raise InvalidRequest(message, param="model", code="wrong_task")

    def check_messages(self, param: str, number: int) -> None:
        """Raise InvalidRequest if there are more messages or items than any model with this context has room for."""
        if number > (most := max(MOST_MESSAGES, self.engine.max_model_len)):
            raise invalid(param, f"must have at most {most} entries, got {number}. Send fewer, or join some of them")

    def check_body(self, body: msgspec.Struct) -> None:
        """Raise InvalidRequest, before any work on them, if a body has too many messages or items."""
        for name in ("messages", "input"):
            messages = getattr(body, name, None)
            if isinstance(messages, list) and messages and isinstance(messages[0], Mapping | msgspec.Struct):
                self.check_messages(name, len(messages))

    def check_model(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter that a request names as its model, or None. Raises ModelNotFound."""
        if name is None or name in self.config.accepted_names:
            return None
        adapters = self.engine.adapters
        if (adapter := adapters.get(name)) is not None:
            return adapter
        raise ModelNotFound(name, *self.config.model_names, *(adapter.name for adapter in adapters.served))

    def name_of(self, adapter: ServedAdapter | None) -> str:
        return self.names_of(adapter)[0]

    def names_of(self, adapter: ServedAdapter | None) -> tuple[str, ...]:
        if adapter is None:
            return self.config.model_names
        return (adapter.name,)

    def accepted_names_of(self, adapter: ServedAdapter | None) -> tuple[str, ...]:
        return self.config.accepted_names if adapter is None else (adapter.name,)


def any_serving_of(request: Request) -> AnyServing:
    serving: AnyServing = request.app.state.serving
    return serving


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
