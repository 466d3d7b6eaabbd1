"""Images whose encoding takes what a test says: the reader and the tower of an engine that computes nothing."""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace

from oaiserve.engine.encoder import Media
from oaiserve.engine.request import ChatPrompt, Request, SamplingParams
from oaiserve.engine.types.media import Encoded, MediaFile, MediaKind, Medium, Prepared, PromptMedia, Vectors


class Pictures:
    """Reads images and encodes them in pieces. `work` is called for each piece with the request's name."""

    placeholders: Mapping[MediaKind, str] = {"image": "user\n"}  # what the template of the double writes before a text

    def __init__(self, work: Callable[[str], object]) -> None:
        self._work = work

    def checked(self, files: Sequence[MediaFile]) -> list[MediaFile]:
        return list(files)

    def prepare(self, file: MediaFile, salt: str, *, only_text: bool = False) -> Prepared:
        name, _, num_pieces = str(file.content).rpartition(" ")
        return Prepared(Medium("image", name.encode(), 1, {"pieces": int(num_pieces)}), "user\n<image>")

    def placed(self, token_ids: list[int], prepared: Sequence[Prepared]) -> PromptMedia:
        return PromptMedia(tuple(one.medium for one in prepared), array("i", range(len(prepared))))

    def pieces(self, medium: Medium) -> Iterator[Encoded | None]:
        for _ in range(medium.inputs["pieces"]):
            self._work(medium.key.decode())
            yield None
        yield Encoded(SimpleNamespace(nbytes=1))


def media_of(work: Callable[[str], object]) -> Media:
    pictures = Pictures(work)
    return Media(frozenset(["image"]), pictures, pictures, Vectors(0))


def picture(name: str, num_pieces: int, **params: object) -> Request:
    """Return a request with an image of some pieces."""
    file = MediaFile("image", f"{name} {num_pieces}")
    prompt = ChatPrompt([{"role": "user", "content": ""}], media=(file,))
    return Request(name, (prompt,), SamplingParams(temperature=0.0, **params))
