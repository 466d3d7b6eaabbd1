"""The encoder: requests whose images or sounds a tower has to make vectors of, before they are scheduled. No torch.

A tower works in pieces between steps, on the engine thread. While others run, pieces get a share of the time, so that
their streams go on almost as fast. A medium that several requests have is encoded once, and its vectors are cached.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from oaiserve.engine.media import Encoded, MediaKind, MediaReader, Medium, Vectors
from oaiserve.engine.tokenize import Tokenized

log = logging.getLogger(__name__)

# Of the time of steps that the tower's pieces get while other requests run: the gap between two of their tokens grows
# by as much, at most by one piece more.
SHARE = 0.15
# For so long it works at once while nothing else runs: commands wait for it.
SLICE_NS = 10_000_000


class Tower(Protocol):
    """Makes vectors of media."""

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        """Work on a medium, up to the next piece at each `next`: None, and its vectors in the end. May raise anything;
        OutOfMemory, if the device has none left."""


@dataclass(frozen=True, slots=True)
class Media:
    """What reads the images or sounds of a model, and makes vectors of them."""

    kinds: frozenset[MediaKind]
    reader: MediaReader
    tower: Tower
    vectors: Vectors


@dataclass(slots=True)
class Encoding:
    """A request whose media are encoded: what it still waits for, and what there is."""

    tokenized: Tokenized
    missing: dict[bytes, Medium]
    encoded: dict[bytes, Encoded]
    spent_ns: int = 0  # by the tower, for this request alone
    num_cached: int = 0  # media whose vectors were there when it came


@dataclass(slots=True)
class Ended:
    """What has come of a request in the encoder: its vectors are there, or an error is."""

    encoding: Encoding
    error: BaseException | None = None


class Encoder:
    """The requests that wait for a tower, in the order in which they came. Engine thread only."""

    def __init__(self, tower: Tower, vectors: Vectors, clock_ns: Callable[[], int]) -> None:
        """Keep vectors in the cache `vectors`."""
        self._tower = tower
        self._vectors = vectors
        self._clock_ns = clock_ns
        self._waiting: deque[Encoding] = deque()
        self._under_way: Iterator[Encoded | None] | None = None
        self._medium: Medium | None = None  # that is under way
        self._credit_ns = 0.0
        self._seen_ns = 0  # when credit was last given
        self.num_encoded = self.num_rows = self.spent_ns = 0  # so far

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, tokenized: Tokenized) -> None:
        """Add a request, which may need nothing."""
        missing: dict[bytes, Medium] = {}
        encoded: dict[bytes, Encoded] = {}
        for medium in (one for prompt in tokenized.media if prompt is not None for one in prompt.media):
            found = medium.encoded or self._vectors.get(medium.key)
            if found is None:
                missing[medium.key] = medium
            else:
                self._vectors.touch(medium.key)
                encoded[medium.key] = found
                drop_inputs(medium)
        if not self._waiting:
            self._credit_ns, self._seen_ns = 0.0, self._clock_ns()
        self._waiting.append(Encoding(tokenized, missing, encoded, num_cached=len(encoded)))

    def turn(self, *, is_alone: bool, is_open: Callable[[str], bool]) -> Iterator[Ended]:
        """Work on the foremost request's media, and yield the requests that have ended here.

        While others run, the work gets a share of the time since the last turn. `is_open` tells whether the request of
        an id still waits.
        """
        now_ns = self._clock_ns()
        self._credit_ns = min(self._credit_ns + SHARE * (now_ns - self._seen_ns), SLICE_NS)
        self._seen_ns = now_ns
        until_ns = now_ns + (SLICE_NS if is_alone else int(self._credit_ns))
        while self._waiting:
            first = self._waiting[0]
            if not is_open(first.tokenized.request.request_id):
                self._leave(first)
            elif not first.missing:
                self._waiting.popleft()
                yield Ended(first)
            elif self._seen_ns >= until_ns:
                return
            else:
                yield from self._work(first)
                before_ns, self._seen_ns = self._seen_ns, self._clock_ns()
                spent_ns = self._seen_ns - before_ns
                self.spent_ns += spent_ns
                first.spent_ns += spent_ns
                if not is_alone:
                    self._credit_ns -= spent_ns

    def _work(self, first: Encoding) -> Iterator[Ended]:
        """Work on one piece."""
        if self._under_way is None:
            self._medium = next(iter(first.missing.values()))
            self._under_way = self._tower.pieces(self._medium)
        medium = self._medium
        assert medium is not None
        try:
            encoded = next(self._under_way)
        except Exception as error:  # whatever a model's code does with an image: only its requests fail
            self._under_way = self._medium = None
            for one in [one for one in self._waiting if medium.key in one.missing]:
                self._leave(one)
                yield Ended(one, error)
            return
        if encoded is None:
            return
        self._under_way = self._medium = None
        self.num_encoded += 1
        self.num_rows += medium.num_rows
        self._vectors.add(medium.key, encoded)
        for one in self._waiting:
            if (waited := one.missing.pop(medium.key, None)) is not None:
                one.encoded[medium.key] = encoded
                drop_inputs(waited)

    def _leave(self, encoding: Encoding) -> None:
        """Forget a request. What is under way for it alone is dropped."""
        self._waiting.remove(encoding)
        for medium in encoding.missing.values():
            drop_inputs(medium)
        if self._medium is not None and not any(self._medium.key in one.missing for one in self._waiting):
            self._under_way = self._medium = None


def drop_inputs(medium: Medium) -> None:
    """Free the prepared pixels of a medium."""
    if medium.inputs is not None:
        medium.inputs.clear()
