"""What the routes are given: one value, made by `app` when the event loop runs, read through `app.state.serving`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request

from oaiserve.engine.request import Prompt
from oaiserve.engine.streams import LoopStreams
from oaiserve.errors import ModelNotFound
from oaiserve.record import Profile, RequestRecord
from oaiserve.routes.feed import Feed
from oaiserve.routes.protocol import UnknownNames


class Tokenizer(Protocol):
    """May block: call it off the event loop."""

    def encode(self, prompt: Prompt, /) -> list[int]: ...

    def decode(self, token_ids: list[int], /) -> str: ...

    def token_text(self, token_id: int, /) -> str: ...


class Engine(Protocol):
    """What the routes ask of the engine besides streams."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def default_params(self) -> Mapping[str, float | int]: ...

    @property
    def failure(self) -> BaseException | None: ...

    @property
    def is_ready(self) -> bool: ...

    def profile(self, num_steps: int, timeout_seconds: float, /) -> Future[Profile]: ...

    def end_profile(self, asked: Future[Profile], /) -> None: ...


class RecentRequests(Protocol):
    """The accounts of the last requests, ready for JSON. Takes milliseconds: call it off the event loop."""

    def list(
        self, *, slowest: str | None, outcome: str | None, id_prefix: str, limit: int | None
    ) -> list[dict[str, Any]]: ...

    def get(self, request_id: str, /) -> dict[str, Any] | None: ...


class LiveSamples(Protocol):
    """The last minutes, second by second, ready for JSON."""

    @property
    def boundaries_seconds(self) -> dict[str, list[float]]: ...

    def after(self, number: int, /) -> list[dict[str, Any]]: ...


@dataclass(frozen=True, slots=True)
class Serving:
    engine: Engine
    streams: LoopStreams
    record: Callable[[RequestRecord], None]
    recent: RecentRequests
    live: LiveSamples
    feed: Feed
    render_metrics: Callable[[str], tuple[bytes, str]]  # Accept -> body, content type; blocks
    model_name: str
    version: str
    created: int  # Unix seconds, as in the API
    body_limit_bytes: int
    body_timeout_seconds: float = 60.0
    stream_interval: int = 1  # tokens of a choice per event, where the request does not say
    profile_dir: Path | None = None  # where profiles are kept; None: none are made
    trace_prompt_characters: int = 0  # most of a prompt that its record carries; 0: nothing
    unknown_names: UnknownNames = field(default_factory=UnknownNames)

    @property
    def fingerprint(self) -> str:
        return f"oaiserve-{self.version}"

    def check_model(self, asked: str | None) -> None:
        """A request without a model means the one that is served."""
        if asked is not None and asked != self.model_name:
            raise ModelNotFound(asked, self.model_name)


def serving_of(request: Request) -> Serving:
    serving: Serving = request.app.state.serving
    return serving
