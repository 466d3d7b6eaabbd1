"""The streams of a server that stores the tokens of requests, or adds their texts to spans.

With --inspect, the engine also reports the log-probabilities of each request's tokens. The client gets the same bytes
as without --inspect: log-probabilities that it didn't request are removed here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oaiserve.engine.event_streams import LoopStream, LoopStreams
from oaiserve.engine.request import TERMINAL, Event, Request, TokenChunk
from oaiserve.plugins.inspector.kept import KeptRequest, KeptRequests
from oaiserve.plugins.inspector.span_texts import SpanTexts


class InspectedStream(LoopStream):
    kept_requests: KeptRequests | None = None
    kept: KeptRequest | None = None
    texts: SpanTexts | None = None

    def push(self, event: Event) -> None:
        if self.texts is not None:
            self.texts.take(event)
            if isinstance(event, TERMINAL):
                event.account.span_texts = self.texts.attributes
        if self.kept is not None and self.kept_requests is not None:
            self.kept.take(event)
            if isinstance(event, TERMINAL):
                self.kept_requests.trim()
        if isinstance(event, TokenChunk) and not self.request.params.shows_logprobs:
            event.logprobs = None
        super().push(event)


class InspectedStreams(LoopStreams):
    stream_type = InspectedStream

    def __init__(self, *arguments: Any, kept: KeptRequests | None, captures: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.kept = kept
        self._captures = captures

    def submit(self, request: Request) -> LoopStream:
        if self.kept is not None and request.params.logprobs is None:
            request = replace(request, params=replace(request.params, logprobs=0, shows_logprobs=False))
        stream = super().submit(request)
        assert isinstance(stream, InspectedStream)
        # These are set before the stream's first event, because this thread delivers the events.
        if self.kept is not None:
            stream.kept_requests = self.kept
            stream.kept = self.kept.add(request)
        if self._captures:
            stream.texts = SpanTexts(request)
        return stream
