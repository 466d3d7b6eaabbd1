"""The encoder lets a tower turn the images and sounds of requests into vectors before they are scheduled. No torch.

A tower works in pieces between steps, on the engine thread. While others run, pieces get a share of the time, so that
their streams stay almost as fast. A medium of several requests is encoded once, and its vectors are cached. A prompt of
several is ready before the media of later ones are encoded.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from oaiserve.engine.encoder_turns import EncoderTurns
from oaiserve.engine.request import Request
from oaiserve.engine.tokenize import Tokenized
from oaiserve.engine.types.media import Encoded, MediaKind, MediaReader, Medium, Vectors
from oaiserve.facts.engine_numbers import EngineNumbers

# Share of step time that encoding may add while other requests run. The gap between two tokens of these requests grows
# by this share, and by at most one piece more.
SHARE = 0.15
# Longest time that the encoder works without a break when nothing else runs. Commands wait meanwhile.
SLICE_NS = 10_000_000


class Tower(Protocol):
    """Makes vectors of media."""

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        """Encode a medium piece by piece: yield None after each piece, and the vectors at the end. May raise anything:
        OutOfMemory if the device has no memory left, or an APIError for the client."""


@dataclass(frozen=True, slots=True)
class Media:
    """The reader and the tower of a model's images or sounds, and the cache of their vectors."""

    kinds: frozenset[MediaKind]
    reader: MediaReader
    tower: Tower
    vectors: Vectors


@dataclass(slots=True, eq=False)
class Encoding:
    """A request whose media are encoded prompt by prompt, with the missing media and the vectors so far."""

    tokenized: Tokenized
    missing: dict[bytes, Medium]
    encoded: dict[bytes, Encoded]
    num_ready: int = 0  # number of leading prompts whose vectors are ready or have been taken
    _uses: Counter[bytes] = field(default_factory=Counter)  # number of prompts that still need each medium

    def __post_init__(self) -> None:
        self._uses.update(one.key for media in self.tokenized.media if media is not None for one in media.media)

    def has_more(self) -> bool:
        """Return whether further prompts have become ready."""
        before = self.num_ready
        for media in self.tokenized.media[before:]:
            if media is not None and not all(one.key in self.encoded for one in media.media):
                break
            self.num_ready += 1
        return self.num_ready > before

    def take(self, number: int) -> tuple[Encoded, ...]:
        """Return the vectors of a prompt that is ready. Those that no other prompt needs are forgotten here."""
        media = self.tokenized.media[number]
        if media is None:
            return ()
        taken = tuple(self.encoded[one.key] for one in media.media)
        for one in media.media:
            self._uses[one.key] -= 1
            if not self._uses[one.key]:
                del self.encoded[one.key]
        return taken


@dataclass(slots=True)
class Ready:
    """A request of which more prompts have encoded media. With an `error`, it failed and has left the encoder."""

    encoding: Encoding
    error: BaseException | None = None


class Encoder:
    """The requests that wait for a tower. Their clients take turns, medium by medium. Engine thread only."""

    def __init__(
        self,
        tower: Tower,
        vectors: Vectors,
        clock_ns: Callable[[], int],
        numbers: EngineNumbers,
        accounted: Callable[[Request], AbstractContextManager[None] | None],
        *,
        by_client: bool = True,
    ) -> None:
        """Keep vectors in the cache `vectors`, and count in `numbers`. `accounted` returns the context in which a piece
        is computed for a request, or None if the request has ended. Unless `by_client`, requests are served in the
        order of arrival."""
        self._tower = tower
        self._vectors = vectors
        self._clock_ns = clock_ns
        self._numbers = numbers
        self._accounted = accounted
        self._waiting = EncoderTurns[Encoding](by_client=by_client)
        self._ready: deque[Encoding] = deque()  # encodings with prompts that have become ready
        self._missing: dict[bytes, list[Encoding]] = {}  # encodings that wait for a medium, keyed by the medium
        self._under_way: Iterator[Encoded | None] | None = None
        self._medium: Medium | None = None  # the medium that is being encoded
        self._credit_ns = 0.0
        self._seen_ns = 0  # when credit was last added

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ready)

    def add(self, tokenized: Tokenized) -> int:
        """Add a request, and return for how many of its media the vectors are already there."""
        missing: dict[bytes, Medium] = {}
        encoded: dict[bytes, Encoded] = {}
        num_media = num_found = 0
        for medium in (one for prompt in tokenized.media if prompt is not None for one in prompt.media):
            vectors = medium.encoded or self._vectors.get(medium.key)
            if medium.key in missing:  # A medium that occurs several times in the prompts is encoded once.
                drop_inputs(medium)
            elif vectors is None:
                missing[medium.key] = medium
            else:
                self._vectors.touch(medium.key)
                encoded[medium.key] = vectors
                num_found += 1
                drop_inputs(medium)
            num_media += 1
        if not self._waiting:
            self._seen_ns = self._clock_ns()
            self._credit_ns = 0.0
        encoding = Encoding(tokenized, missing, encoded)
        if encoding.has_more():
            self._ready.append(encoding)
        if missing:
            self._waiting.add(encoding, tokenized.request.client)
            self._numbers.num_encoding += 1
        for key, medium in missing.items():
            self._missing.setdefault(key, []).append(encoding)
            if len(self._missing[key]) == 1:
                self._numbers.num_waiting_media_rows += medium.num_rows
        self._numbers.num_media_queries += num_media
        self._numbers.num_media_hits += num_found
        return num_found

    def turn(self, *, is_alone: bool) -> Iterator[Ready]:
        """Work on media. Yield the requests that have further prompts ready, and those that failed.

        While other requests run, the encoder gets only a share of the time since its last turn.
        """
        now_ns = self._clock_ns()
        self._credit_ns = min(self._credit_ns + SHARE * (now_ns - self._seen_ns), SLICE_NS)
        self._seen_ns = now_ns
        until_ns = now_ns + (SLICE_NS if is_alone else int(self._credit_ns))
        while self.has_work:
            if self._ready:
                yield Ready(self._ready.popleft())
                if is_alone:  # Start the prompts that are ready before encoding more.
                    until_ns = self._seen_ns
                continue
            first = self._next()
            accounted = self._accounted(first.tokenized.request)
            if accounted is None:
                self._leave(first)
            elif self._seen_ns >= until_ns:
                return
            else:
                with accounted:
                    failed = self._work(first)
                yield from failed
                before_ns = self._seen_ns
                self._seen_ns = self._clock_ns()
                if not is_alone:
                    self._credit_ns -= self._seen_ns - before_ns

    def _next(self) -> Encoding:
        """Return a request that waits for the medium under way, or else the next request."""
        if self._medium is not None:
            return self._missing[self._medium.key][0]
        return self._waiting.first()

    def _work(self, first: Encoding) -> list[Ready]:
        """Work on one piece. Return the requests that fail because of an error in it."""
        if self._under_way is None:
            self._medium = next(iter(first.missing.values()))
            self._under_way = self._tower.pieces(self._medium)
        medium = self._medium
        assert medium is not None
        try:
            encoded = next(self._under_way)
        except BaseException as error:  # An error in a model's code fails only the requests with this medium.
            self._under_way = self._medium = None
            failed = list(self._missing[medium.key])
            for one in failed:
                self._leave(one)
            return [Ready(one, error) for one in failed]
        if encoded is None:
            return []
        self._under_way = self._medium = None
        self._numbers.num_media_encoded += 1
        self._numbers.num_media_rows += medium.num_rows
        self._numbers.num_waiting_media_rows -= medium.num_rows
        request = first.tokenized.request
        self._waiting.served(request.client, medium.num_rows, request.share)
        self._vectors.add(medium.key, encoded)
        self._numbers.media_cache_bytes = self._vectors.num_bytes
        for one in self._missing.pop(medium.key):
            drop_inputs(one.missing.pop(medium.key))
            one.encoded[medium.key] = encoded
            if one.has_more():
                self._ready.append(one)
            if not one.missing:
                self._leave(one)
        return []

    def _leave(self, encoding: Encoding) -> None:
        """Forget a request. Work under way for this request alone is dropped."""
        self._waiting.remove(encoding, encoding.tokenized.request.client)
        self._numbers.num_encoding -= 1
        for key, medium in encoding.missing.items():
            drop_inputs(medium)
            self._missing[key].remove(encoding)
            if not self._missing[key]:
                del self._missing[key]
                self._numbers.num_waiting_media_rows -= medium.num_rows
        if self._medium is not None and self._medium.key not in self._missing:
            self._under_way = self._medium = None


def drop_inputs(medium: Medium) -> None:
    """Free the prepared pixels of a medium."""
    if medium.inputs is not None:
        medium.inputs.clear()
