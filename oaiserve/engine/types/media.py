"""The images and sounds of prompts, from a client's file to the vectors that a model reads. No torch, no HTTP.

A `MediaFile` is what a client sends. A tokenize worker turns it into a `Medium`, which is ready for the model's tower.
The tower turns that into an `Encoded`, whose vectors replace embeddings of tokens.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

MediaKind = Literal["image", "audio"]
Detail = Literal["auto", "low", "high"]

FILE_BYTES = 20 * 2**20  # limit for one image or sound
PROMPT_IMAGES = 16  # A prompt may have as many pixels as this many images of the largest size.

if TYPE_CHECKING:
    Integers = array[int]
    Content = bytes | str
else:
    Integers = array
    Content = Any  # msgspec, which checks the types of messages to an engine process, supports no such union


class MediaLimits(NamedTuple):
    """The limits of images and sounds, from the settings."""

    max_bytes: int = FILE_BYTES
    max_pixels: int = 16_000_000  # limit for one decoded image
    max_seconds: float = 600.0  # limit for one sound
    cache_bytes: int = 512 * 2**20  # limit for stored vectors

    @property
    def max_prompt_pixels(self) -> int:
        return PROMPT_IMAGES * self.max_pixels


@dataclass(frozen=True, slots=True)
class MediaFile:
    """An image or a sound as a client sends it. It is not decoded yet, so it may be anything."""

    kind: MediaKind
    content: Content  # a string is base64, as `data_url.base64_decoded` reads it
    detail: Detail = "auto"
    param: str = "messages"  # the request's field that contained it, for errors
    where: str = ""  # JSON path within the parameter, such as messages[0].content[1]


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """The vectors that a tower has made of one medium. They never change."""

    vectors: Any  # tensor [rows, hidden size], in the model's dtype and on its device
    deep: tuple[Any, ...] = ()  # tensors of the same shape, which are added to the outputs of the first layers

    @property
    def num_bytes(self) -> int:
        return sum(int(tensor.nbytes) for tensor in (self.vectors, *self.deep))


@dataclass(frozen=True, slots=True, eq=False)
class Medium:
    """An image or a sound of a prompt, ready for the tower."""

    kind: MediaKind
    key: bytes  # 16 bytes: the hash of its content, of the options that it is prepared with, and of the salt
    num_rows: int  # number of vectors, each of which replaces one token
    inputs: Any = None  # the tower's arguments; None if `encoded` was found
    encoded: Encoded | None = None  # vectors found in the cache


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """The media of one prompt, and the tokens whose embeddings are replaced by their vectors."""

    media: tuple[Medium, ...]
    places: Integers  # ascending indices of the prompt's tokens that are replaced by vectors
    # The prompt's positions by time, then by height, then by width; empty: positions equal indices.
    axes: Integers = field(default_factory=lambda: array("i"))
    # The difference between position and index for tokens after the prompt.
    delta: int = 0
    # Runs of tokens that attend to each other in both directions, as (first, end), ascending.
    runs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a position greater than its token's index, because position tables may be too short."""
        if self.delta > 0 or (self.axes and 3 * max(self.axes) >= len(self.axes)):
            raise ValueError(f"a token has a position behind its index: up to {max(self.axes, default=0)}")

    def position(self, index: int) -> int:
        """Return the position of a token by time."""
        length = len(self.axes) // 3
        if index < length:
            return self.axes[index]
        return index + self.delta

    def positions(self, axis: int, start: int, end: int) -> list[int]:
        """Return the positions of the tokens from `start` up to `end` by time, height or width."""
        length = len(self.axes) // 3
        own = self.axes[axis * length + start : axis * length + min(end, length)]
        return [*own, *range(max(start, length) + self.delta, end + self.delta)]

    def whole_end(self, start: int, end: int) -> int:
        """Return where to end a chunk so that it doesn't end inside a run: at most `end`, unless the chunk begins with
        a run that is longer."""
        for first, last in self.runs:
            if first < end < last:
                if first > start:
                    return first
                return last
        return end

    def rows_in(self, start: int, end: int) -> range:
        """Return the rows of all vectors for the tokens from `start` up to `end`."""
        return range(bisect_left(self.places, start), bisect_left(self.places, end))

    def keys_in(self, start: int, end: int) -> bytes:
        """Return the keys of the media that have tokens from `start` up to `end`, for the hash of a block."""
        rows = self.rows_in(start, end)
        keys = b""
        first = 0
        for medium in self.media:
            if first < rows.stop and rows.start < first + medium.num_rows:
                keys += medium.key
            first += medium.num_rows
        return keys


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A medium and the text that stands for it in the prompt."""

    medium: Medium
    text: str
    shape: Any = None  # shape from which its tokens' positions follow, if these have three axes


class MediaReader(Protocol):
    """Prepares media for a model's tower. Any number of threads may call it."""

    placeholders: Mapping[MediaKind, str]  # the texts that the texts of media replace

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        """Return the files as bytes, after checking in their headers that they don't have more pixels than a prompt may
        have. Raises InvalidRequest."""

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        """Prepare a client's file, for the tower unless `only_text` is needed. Its vectors are shared only among
        requests with the same salt. Raises an APIError for a file that is not such a medium, or is too large."""

    def placed(self, token_ids: list[int], prepared: Sequence[Prepared]) -> PromptMedia:
        """Return the media of a prompt, given its token ids. Raises InvalidRequest if ids and media don't match."""


class Vectors:
    """The cache of `Encoded`, keyed by medium. Above `max_bytes`, the least recently used are dropped first.

    Only the engine thread calls `add` and `touch`; any thread may call `get`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Encoded] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Encoded | None:
        return self._kept.get(key)

    def touch(self, key: bytes) -> None:
        """Note that a medium has been used."""
        if key in self._kept:
            self._kept.move_to_end(key)

    def add(self, key: bytes, encoded: Encoded) -> None:
        """Store the vectors of a medium, unless they alone are too large."""
        if key in self._kept or encoded.num_bytes > self._max_bytes:
            return
        self._kept[key] = encoded
        self.num_bytes += encoded.num_bytes
        while self.num_bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
