"""The events of open requests on their way to consumers. Engine thread only, no torch."""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import replace

from oaiserve.engine.request import Deliver, Event, PromptDone, TokenChunk
from oaiserve.engine.requests.open_request import OpenRequest

log = logging.getLogger(__name__)


class Outbox:
    """Collects the events since the last hand-over, by consumer."""

    def __init__(self) -> None:
        self._events: defaultdict[Deliver, list[Event]] = defaultdict(list)

    def __len__(self) -> int:
        """Return the number of consumers with events."""
        return len(self._events)

    def emit(self, opened: OpenRequest, event: Event) -> None:
        """Put an event into the next hand-over."""
        self._events[opened.deliver].append(event)

    def emit_chunk(self, opened: OpenRequest, chunk: TokenChunk) -> None:
        """Emit a chunk of a choice. Before the first chunk of a prompt, emit that the prompt is done."""
        index = chunk.index // opened.request.params.n
        prompt = opened.prompts[index]
        if not prompt.sent:
            prompt.sent = True
            done = (prompt.token_ids, prompt.logprobs, replace(opened.times), prompt.cached_tokens, prompt.lost)
            self.emit(opened, PromptDone(opened.request.request_id, index, *done, prompt.texts))
        self._events[opened.deliver].append(chunk)

    def hand_over(self) -> list[Deliver]:
        """Deliver all events, with one call per consumer. Return the consumers that raised an error."""
        outbox = self._events
        self._events = defaultdict(list)
        failed: list[Deliver] = []
        for deliver, events in outbox.items():
            try:
                deliver(events)
            except Exception:  # a consumer that fails must not stop the others
                log.exception("A consumer failed to take its events; its requests are dropped")
                failed.append(deliver)
        return failed
