"""`Shape`: the interface for rendering an answer in the format of its route."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from oaiserve.engine.request import PromptDone, PromptProgress, TokenChunk, Usage
from oaiserve.routes.exchange import RequestTimings

# The longest time between two events that clients count as activity, while a prompt is computed. Codex and Claude Code
# ignore comments and pings, and give up after 300 s without an event of another kind.
ACTIVITY_SECONDS = 10.0

Timings = Callable[[Usage], RequestTimings]  # called at the end of a stream, if the client asked for timings


class Shape(Protocol):
    """Renders one answer in the format of its route, either as a stream or whole.

    In a stream, `prompt` and `delta` return any number of server-sent events, or none. `finished` and `failed` return
    the last ones, with the route's own end of the stream. Large ones come in pieces, which are rendered when they are
    written. `whole` reads the answer at once, and renders it in pieces. If a prompt takes long, `begun` returns the
    events that `prompt` then leaves out, and `progress` a sign of life. `activity` returns an event without content
    that resets the idle timeouts of clients.
    """

    @property
    def activity_seconds(self) -> float: ...  # longest time without an event that clients count as activity

    @property
    def is_numbered(self) -> bool: ...  # True if events have numbers

    def begun(self, event: PromptProgress, /) -> bytes: ...

    def progress(self, event: PromptProgress, /) -> bytes: ...

    def activity(self) -> bytes: ...

    def prompt(self, event: PromptDone, /) -> Iterable[bytes]: ...

    def delta(self, chunk: TokenChunk, /) -> bytes: ...

    def finished(self, usage: Usage, timings: Timings, /) -> Iterable[bytes]: ...

    def failed(self, error: Mapping[str, Any], /) -> bytes: ...

    def whole(
        self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage, /
    ) -> Iterator[bytes]: ...


# Like `Shape.whole`, for the chunks of choices or the vectors of prompts, in order.
RenderWhole = Callable[[Sequence[PromptDone], Sequence[Any], Usage], Iterator[bytes]]
