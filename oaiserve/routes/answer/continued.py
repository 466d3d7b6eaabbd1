"""`ContinuedShape` renders a stream that another server can continue, or the rest of one that another server began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from oaiserve.engine.request import PromptDone, PromptProgress, TokenChunk, Usage
from oaiserve.routes.answer.shape import Shape, Timings
from oaiserve.wire.continuation import BEGUN, NOTHING, SIGN, Piece, mark


class ContinuedShape:
    """A shape that adds marks to events, for the gateway in front, and leaves out what the client already has.

    The events that the client has are rendered, too, to bring the shape to the point where the answer continues.
    """

    def __init__(self, shape: Shape, sent: Sequence[Piece], num_choices: int, num_signs: int) -> None:
        """The client has the `sent` pieces and `num_signs` numbered signs of life. A prompt has `num_choices`."""
        self._shape = shape
        self._sent = {piece.choice for piece in sent}
        self._num_choices = num_choices
        for _ in range(num_signs):
            shape.activity()

    @property
    def activity_seconds(self) -> float:
        return self._shape.activity_seconds

    @property
    def is_numbered(self) -> bool:
        return self._shape.is_numbered

    def begun(self, event: PromptProgress) -> bytes:
        body = self._shape.begun(event)
        return body + mark(BEGUN) if body and not self._sent else b""

    def progress(self, event: PromptProgress) -> bytes:
        return self._shape.progress(event) + mark(NOTHING)

    def activity(self) -> bytes:
        return self._shape.activity() + mark(SIGN if self._shape.is_numbered else NOTHING)

    def prompt(self, event: PromptDone) -> Iterable[bytes]:
        first = event.prompt_index * self._num_choices
        parts = self._shape.prompt(event)
        if self._sent.isdisjoint(range(first, first + self._num_choices)):
            yield from parts
        else:
            yield from (b"" for _ in parts)

    def delta(self, chunk: TokenChunk) -> bytes:
        body = self._shape.delta(chunk)
        return b"" if chunk.was_sent else body + mark(Piece(chunk.index, chunk.token_ids))

    def finished(self, usage: Usage, timings: Timings) -> Iterable[bytes]:
        return self._shape.finished(usage, timings)

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return self._shape.failed(error)

    def whole(self, prompts: Sequence[PromptDone], choices: Sequence[TokenChunk], usage: Usage) -> Iterator[bytes]:
        return self._shape.whole(prompts, choices, usage)
