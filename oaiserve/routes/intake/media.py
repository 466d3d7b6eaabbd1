"""The images and sounds of a request. Those that its body only names are fetched, and prompts get all of them as files.

Nothing is decoded here: that happens where prompts are tokenized.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec
from starlette.requests import Request

from oaiserve.engine.types.media import FILE_BYTES, Detail, MediaFile, MediaKind
from oaiserve.errors import InvalidRequest, NotFetched
from oaiserve.http.data_url import is_bare_image, is_data_url, is_for_urls, percent_decoded, read_data_url
from oaiserve.routes.adaptations import STORED, Adaptations, Note
from oaiserve.routes.exchange import Exchange
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.last_turn import first_asked
from oaiserve.routes.intake.named_files import read_files, uploaded
from oaiserve.routes.intake.object_types import Base64Source, FileSource, ImageBlock, ImagePart, InputImage, SoundPart
from oaiserve.routes.intake.receive import HeldBytes
from oaiserve.routes.intake.turns import in_turns_if_large
from oaiserve.routes.serving import Serving, serving_of

MediaPart = ImagePart | SoundPart | InputImage | ImageBlock
Part = dict[str, Any]
_NOUNS: dict[MediaKind, str] = {"image": "images", "audio": "sounds"}
# The model reads this instead of a medium.
_STAND_INS: dict[MediaKind, str] = {"image": "[Image left out]", "audio": "[Sound left out]"}
# Parts that may only name an image, by their types.
NAMED_IN: dict[str, type[ImagePart | InputImage | ImageBlock]] = {
    "image_url": ImagePart,
    "input_image": InputImage,
    "image": ImageBlock,
}
_HOLDERS = ("messages", "input", "content", "output")  # fields of bodies, messages and items that hold parts


class MediaSource(NamedTuple):
    """A medium as a part of a body states it: in base64, or by its URL or file id."""

    kind: MediaKind
    base64: str | None = None
    url: str = ""
    file_id: str = ""
    detail: Detail = "auto"

    @property
    def name(self) -> str:
        """Return its URL or file id, or "" if the body has the medium itself."""
        return self.file_id or ("" if is_data_url(self.url) or is_bare_image(self.url) else self.url)


def source_of(part: MediaPart, where: str) -> MediaSource:
    match part:
        case SoundPart(sound):
            return MediaSource("audio", sound.data)
        case ImageBlock(source):
            if isinstance(source, Base64Source):
                return MediaSource("image", source.data)
            if isinstance(source, FileSource):
                return MediaSource("image", file_id=source.file_id)
            return MediaSource("image", url=source.url)
        case ImagePart(image):
            if isinstance(image, str):
                return MediaSource("image", url=image)
            return MediaSource("image", url=image.url, detail=_fineness(image.detail))
        case InputImage():
            if bool(part.image_url) == bool(part.file_id):
                raise invalid(_top(where), "needs either 'image_url' or 'file_id'", where)
            return MediaSource("image", None, part.image_url or "", part.file_id or "", _fineness(part.detail))


def _fineness(detail: str | None) -> Detail:
    return cast("Detail", {None: "auto", "original": "high"}.get(detail, detail))


class MediaReader:
    """Makes the parts and the files of a prompt from the media in the body of a request."""

    def __init__(self, serving: Serving, note: Note | None = None, known: MediaReader | None = None) -> None:
        """`known` is an earlier reader of the same body, whose fetched media and files are reused."""
        self._serving = serving
        self._kinds = serving.engine.media
        self._most = serving.config.server.max_images
        # Contents of media that the body refers to, by their names.
        self.contents: Mapping[str, bytes] = {} if known is None else known.contents
        self.named: Named = {}  # media that `fetch` fetches
        self._num_file_bytes: int = 0 if known is None else known._num_file_bytes
        self._note = note or Adaptations().note
        self._asked: set[str] = set()  # the places of the media in the user's last turn

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that were fetched."""
        return self._num_file_bytes + sum(map(len, self.contents.values()))

    def part(self, part: MediaPart, where: str, param: str = "", *, is_asked: bool) -> Part:
        """Return a part for a chat message that contains its file, until `taken` takes the file out. `is_asked` says
        that it is in the user's last turn. Raises InvalidRequest."""
        source = source_of(part, where)
        param = param or _top(where)
        self.check_kind(source.kind, param, where)
        if source.name and source.name not in self.contents:
            raise invalid(param, f"{show(source.name)} was not fetched", where)
        content = self.contents[source.name] if source.name else self._content(source, param, where)
        if is_asked:
            self._asked.add(where)
        return {"type": source.kind, "file": MediaFile(source.kind, content, source.detail, param, where)}

    def _content(self, source: MediaSource, param: str, where: str) -> bytes | str:
        """Return a file that is in the body itself: its bytes, or its base64. Raises InvalidRequest."""
        text = source.url if source.base64 is None else source.base64
        if is_data_url(text):
            url = read_data_url(text)
            major = "" if url is None else url.type.partition("/")[0]
            # The file itself shows its type. Clients state all kinds of types, or none.
            if url is None or major in {"image", "audio", "video"} - {source.kind}:
                reason = f"must be a URL with data:{source.kind}/...;base64, or http(s):, got {show(text)}"
                raise invalid(param, reason, where)
            if not url.is_base64:
                return b"".join(percent_decoded(url.data))
            text = url.data
        elif source.base64 is None:
            if not text:
                raise invalid(param, "must be a URL with data:, http: or https:, got ''", where)
            self._note(where, "base64 without a data URL is read as an image")
        if is_for_urls(text):
            self._note(where, "base64 in the alphabet for URLs is read")
        return text

    def reads(self, kind: MediaKind) -> bool:
        return kind in self._kinds

    def check_kind(self, kind: MediaKind, param: str, where: str) -> None:
        if kind not in self._kinds:
            reads = " and ".join(["text", *sorted(_NOUNS[each] for each in self._kinds)])
            alone = "text alone" if not self._kinds else reads
            raise invalid(
                param, f"the model '{self._serving.config.model_name}' reads {alone}, no {_NOUNS[kind]}", where
            )

    async def fetch(self, request: Request, held: HeldBytes, body: object = None) -> None:
        """Fetch the named media, and put the texts of named files into the parts of `body`. Their bytes are `held`
        meanwhile. Raises InvalidRequest and Overloaded."""
        if body is not None:
            self._num_file_bytes += await read_files(request, held, body)
        most = self._serving.body_limit
        named = {name: each for name, each in self.named.items() if each[1].is_needed or self.reads(each[0].kind)}
        for source, place in named.values():
            self.check_kind(source.kind, place.param, place.where)
        limit = self._most
        if (num_needed := sum(place.is_needed for _, place in named.values())) > limit:
            raise InvalidRequest(f"The request names {num_needed} files, but may have at most {limit} (--max-images).")
        others = [name for name, each in named.items() if not each[1].is_needed]
        for name in others[: num_left_out(len(named), limit)]:
            del named[name]

        def take(num_bytes: int) -> None:
            """Count bytes like those of a body: all files that are only named may be as large as one body."""
            if held.number + num_bytes > most:
                raise InvalidRequest(f"The files that the request names have more than {most} bytes (--body-limit).")
            held.take(num_bytes)

        tasks = [asyncio.create_task(_content(request, self._serving, *each, take)) for each in named.values()]
        try:
            contents = dict(zip(named, await asyncio.gather(*tasks), strict=True))
            self.contents = {**self.contents, **{name: each for name, each in contents.items() if each is not None}}
        finally:
            for task in tasks:
                task.cancel()

    def taken(self, messages: Iterable[Mapping[str, Any]], note: Note) -> tuple[MediaFile, ...]:
        """Take the files out of the parts of messages, in their order. If there are too many, the oldest are left out.
        Raises InvalidRequest if those in the user's last turn alone are too many."""
        contents = (message["content"] for message in messages if isinstance(message["content"], list))
        parts = [part for content in contents for part in content if "file" in part]
        for kind, noun in _NOUNS.items():
            of_kind = [part for part in parts if part["type"] == kind]
            old = [part for part in of_kind if part["file"].where not in self._asked]
            if (number := len(of_kind) - len(old)) > self._most:
                reason = f"may have at most {self._most} {noun} (--max-images), got {number}"
                raise invalid(of_kind[0]["file"].param, reason)
            for part in old[: num_left_out(len(of_kind), self._most)]:
                file: MediaFile = part.pop("file")
                note(file.where, f"is left out, as there are too many {noun} (--max-images)")
                part |= {"type": "text", "text": _STAND_INS[kind]}
        return tuple(part.pop("file") for part in parts if "file" in part)


def num_left_out(number: int, most: int) -> int:
    """Return how many of the oldest media are left out: a multiple of a quarter of the most, so that several turns of
    an agent, each with a new screenshot, begin with the same prompt, which the prefix cache has."""
    group = max(1, most // 4)
    return -(-max(0, number - most) // group) * group


class _Place(NamedTuple):
    """The place of a medium in a request. A medium outside the user's last turn may be missing; then it is left out."""

    param: str
    where: str
    is_needed: bool


Named = dict[str, tuple[MediaSource, _Place]]  # media by URL or file id


async def read_media(
    request: Request,
    body: object,
    num_bytes: int,
    stored: Callable[[], Iterable[Part]] = tuple,
    known: MediaReader | None = None,
) -> MediaReader:
    """Return a reader for the media of a body and of the items that it continues. Media and texts that are only named
    and not yet `known` are fetched. Raises InvalidRequest and Overloaded."""
    serving = serving_of(request)
    exchange: Exchange | None = getattr(request.state, "exchange", None)  # No exchange: the route generates nothing.
    note = None if exchange is None else exchange.adaptations.note
    reader = MediaReader(serving, note, known)
    if serving.engine.media:
        reader.named = await in_turns_if_large(request, named_media(body, stored, reader.contents), num_bytes)
    with HeldBytes(serving.received_bytes, request.state.client) as held:
        await reader.fetch(request, held, body if known is None else None)
    return reader


def named_media(
    body: object, stored: Callable[[], Iterable[Part]] = tuple, known: Container[str] = ()
) -> Generator[None, None, Named]:
    """Return the media that a body, or a stored item before it, only names, without those that are `known`."""
    yield
    sources: Named = {}
    for item in stored():
        place = _Place("input", f"{STORED}{item['id']}", is_needed=False)
        sources |= {source.name: (source, place) for _, source in _sources_in(item, "") if source.name}
    in_last_turn = _asked_in(body)
    for where, source in _sources_in(body, ""):
        if source.name:
            # A part within another one is in the result of a tool.
            is_asked = where.startswith(in_last_turn) and where.count(".") == 1
            is_needed = is_asked or (source.name in sources and sources[source.name][1].is_needed)
            sources[source.name] = source, _Place(_top(where), where, is_needed)
    return {name: each for name, each in sources.items() if name not in known}


def _sources_in(value: Any, where: str) -> Iterator[tuple[str, MediaSource]]:
    if isinstance(value, MediaPart):
        yield where, source_of(value, where)
    elif isinstance(value, dict) and (kind := NAMED_IN.get(str(value.get("type")))) is not None:
        try:
            yield where, source_of(msgspec.convert(value, kind), where)
        except (msgspec.ValidationError, InvalidRequest):
            return  # the code that makes the part reports its error, if it is needed
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _sources_in(each, f"{where}[{number}]")
    elif isinstance(value, msgspec.Struct | dict):
        for name in _HOLDERS:
            if isinstance(value, dict):
                inner = value.get(name)
            else:
                inner = getattr(value, name, None)
            if isinstance(inner, list):
                yield from _sources_in(inner, f"{where}.{name}".lstrip("."))


def _asked_in(body: object) -> tuple[str, ...]:
    """Return the places of the messages or items of the user's last turn."""
    places: list[str] = []
    for name in ("messages", "input"):
        entries = getattr(body, name, None)
        if isinstance(entries, list):
            roles = [each.get("role") if isinstance(each, dict) else getattr(each, "role", None) for each in entries]
            places += (
                f"{name}[{number}]." for number in range(first_asked(roles), len(entries)) if roles[number] == "user"
            )
    return tuple(places)


async def _content(
    request: Request, serving: Serving, source: MediaSource, place: _Place, take: Callable[[int], None]
) -> bytes | None:
    """Return a medium, or None if it is missing and not needed. Raises InvalidRequest and Overloaded."""
    refused = partial(invalid, place.param, where=place.where)
    try:
        if source.file_id:
            return await uploaded(request, source.file_id, refused, take)
        if source.url[:4].lower() != "http":
            raise refused(f"must be a URL with data:, http: or https:, got {show(source.url)}")
        if serving.fetcher is None:
            reason = "this server fetches nothing: it runs without --allow-media-from. Send a data: URL"
            raise refused(f"{reason}, got {show(source.url)}")
        try:
            return await serving.fetcher.fetch(source.url, source.kind, FILE_BYTES, take)
        except NotFetched as error:
            raise refused(f"{show(source.url)} is not fetched: {error}") from error
    except InvalidRequest:
        if place.is_needed:
            raise
        return None


def _top(where: str) -> str:
    return where.partition("[")[0]
