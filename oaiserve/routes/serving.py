"""Defines `Serving`, the one value through which routes reach the rest of the server, and its components.

`app` makes it when the event loop runs, and puts it into `app.state.serving`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from oaiserve.config import Config
from oaiserve.engine.adapters import AdapterTable, ServedAdapter
from oaiserve.engine.backpressure import SharedLimit
from oaiserve.engine.pooling import Pooling, Task
from oaiserve.engine.streams import LoopStreams
from oaiserve.engine.text.tokenizer import Tokenizer
from oaiserve.errors import InvalidRequest, ModelNotFound
from oaiserve.facts.record import RequestRecord
from oaiserve.facts.report import ReplicaReport
from oaiserve.routes.dialects.dialect import Dialect
from oaiserve.routes.feed import Feed
from oaiserve.routes.protocol import UnknownNames
from oaiserve.routes.responses.runs import Runs
from oaiserve.routes.responses.store import ResponseStore

MOST_RECEIVED_BYTES = 256 * 2**20
Result = TypeVar("Result")


class ServedEngine(Protocol):
    """The engine as the routes see it: limits, tokenizer and health. Requests go through `LoopStreams`."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...  # it blocks, so routes use it only in `run_in_turns`

    @property
    def default_params(self) -> Mapping[str, float | int]: ...

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def hang(self) -> str: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_reporting(self) -> bool: ...

    def report(self) -> ReplicaReport: ...

    @property
    def pooling(self) -> Pooling | None: ...

    @property
    def adapters(self) -> AdapterTable: ...

    def load_adapter(self, name: str, path: Path, /) -> ServedAdapter: ...

    def unload_adapter(self, name: str, /) -> ServedAdapter: ...

    def run_in_turns(
        self, work: Generator[None, None, Result], /, *, client: str, num_bytes: int
    ) -> Future[Result]: ...

    def give_back_later(self) -> None: ...


class RecentEntries(Protocol):
    """The accounts of the last requests, ready for JSON. A call takes milliseconds, so routes make it in a worker
    thread."""

    def list(
        self, *, slowest: str | None, outcome: str | None, id_prefix: str, limit: int | None
    ) -> list[dict[str, Any]]: ...

    def get(self, request_id: str, /) -> dict[str, Any] | None: ...


class LiveSamples(Protocol):
    """The samples of the last minutes, one for each second, ready for JSON."""

    @property
    def boundaries_seconds(self) -> dict[str, list[float]]: ...

    def after(self, number: int, /) -> list[dict[str, Any]]: ...


_IS_FOR = {
    "generate": "generates text, by /v1/chat/completions, /v1/completions, /v1/responses and /v1/messages; "
    "this route is not for it",
    "embed": "turns texts into vectors, by /v1/embeddings, /v1/score and /v1/rerank; this route is not for it",
    "score": "scores pairs of texts, by /v1/score and /v1/rerank; this route is not for it",
}
_INSTEAD = {
    "generate": "Start a server with a model that generates text, such as 'oaiserve serve Qwen/Qwen3-0.6B'.",
    "embed": "Start a server with an embedding model, such as 'oaiserve serve BAAI/bge-small-en-v1.5', or with "
    "--task embed if this model is meant for that.",
    "score": "Start a server with a reranker, such as 'oaiserve serve BAAI/bge-reranker-base', or with an embedding "
    "model.",
}


@dataclass(frozen=True, slots=True)
class Serving:
    config: Config
    engine: ServedEngine
    streams: LoopStreams
    record: Callable[[RequestRecord], None]
    recent: RecentEntries
    live: LiveSamples
    feed: Feed
    render_metrics: Callable[[str], tuple[bytes, str]]  # takes an Accept header, returns body and content type; blocks
    model_root: str  # the folder or hub id of the model: clients load its tokenizer by it
    version: str
    kind: str  # which servers have in common that write the same bytes for the same request; "" if there are none
    created: int  # Unix seconds, as in the API
    responses: ResponseStore
    runs: Runs
    received_bytes: SharedLimit  # of the bodies that are being received: a client may send many slowly
    dialect: Dialect  # of calls and reasoning in the model's answers
    unknown_names: UnknownNames = field(default_factory=UnknownNames)

    @property
    def task(self) -> Task:
        return "generate" if self.engine.pooling is None else self.engine.pooling.task

    def check_task(self, *tasks: Task) -> None:
        """Raise InvalidRequest if the model is for none of these tasks, with the right command."""
        if self.task not in tasks:
            message = f"'{self.config.model_name}' {_IS_FOR[self.task]}. {_INSTEAD[tasks[-1]]}"
            raise InvalidRequest(message, param="model", code="wrong_task")

    def check_model(self, asked: str | None) -> ServedAdapter | None:
        """Return the adapter that a request names as its model, or None. Raises ModelNotFound."""
        if asked is None or asked == self.config.model_name:
            return None
        adapters = self.engine.adapters
        if (adapter := adapters.get(asked)) is not None:
            return adapter
        raise ModelNotFound(asked, self.config.model_name, *(adapter.name for adapter in adapters.served))

    def name_of(self, adapter: ServedAdapter | None) -> str:
        """Return the name of the model with this adapter, which answers and records have."""
        return self.config.model_name if adapter is None else adapter.name


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
