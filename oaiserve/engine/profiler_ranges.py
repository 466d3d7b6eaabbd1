"""Ranges for a profiler: what marks them, and the phases of requests. No torch. Only used with --nvtx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from oaiserve.engine.tokenize import Tokenized, TokenizeEvent, TokenizeFailed, TokenizeStarted


class Ranges(Protocol):
    """Marks ranges. The ranges of a thread nest; those of requests overlap and may end on another thread."""

    def push(self, name: str) -> None: ...

    def pop(self) -> None:
        """End the innermost range of this thread."""

    def start(self, phase: str, request_id: str) -> Any:
        """Begin the range of a request's phase, and return the argument for `end`."""

    def end(self, started: Any) -> None: ...


class PhaseRanges:
    """The phases of requests. A tokenize worker begins the first ones, and the engine thread the others."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        self._started: dict[str, Any] = {}  # the phase under way, by request id

    def enter(self, request_id: str, phase: str) -> None:
        """End the phase under way, if there is one, and begin another."""
        self.leave(request_id)
        self._started[request_id] = self._ranges.start(phase, request_id)

    def leave(self, request_id: str) -> None:
        """End the phase under way, if there is one. All requests end here, also those never tokenized."""
        started = self._started.pop(request_id, None)
        if started is not None:
            self._ranges.end(started)

    def watch(self, post: Callable[[TokenizeEvent], None]) -> Callable[[TokenizeEvent], None]:
        """Return a wrapper of the tokenize stage's `post` that marks the phases before it passes an event on."""

        def watched(event: TokenizeEvent) -> None:
            request_id = event.request.request_id
            match event:
                case TokenizeStarted():
                    self.enter(request_id, "tokenize")
                case Tokenized() if event.token_ids and request_id in self._started:  # otherwise the request has ended
                    self.enter(request_id, "encode_media" if any(event.media) else "queue")
                case Tokenized() | TokenizeFailed():
                    self.leave(request_id)
            post(event)

        return watched
