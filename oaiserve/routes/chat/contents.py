"""The contents of messages and items, as chat templates expect them: texts, images and sounds.

Unreadable content is refused if the user asks about it now. In older turns and in results of tools, it would cause the
same error in each further request. There it is left out with a note, and the model reads that something is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.routes.adaptations import Note
from oaiserve.routes.chat.call_arguments import is_deep
from oaiserve.routes.chat.foreign import NOT_READ, is_unread, name_of, text_of
from oaiserve.routes.intake.invalid import converted, invalid
from oaiserve.routes.intake.media import MediaReader
from oaiserve.routes.intake.object_types import ImagePart, InputImage, SoundPart

Part = dict[str, Any]
MEDIA: dict[str, type[ImagePart | InputImage | SoundPart]] = {
    "image_url": ImagePart,
    "input_image": InputImage,
    "computer_screenshot": InputImage,
    "input_audio": SoundPart,
}
_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = {"thinking": "thinking", "reasoning_text": "text", "reasoning": "text"}  # fields with the text, by type
_OF_TEXT = {"type", "text", "annotations", "logprobs", "cache_control"}
_MOST_FIELDS = 32  # fields of a text or a message for the template
_MOST_DEPTH = 16
WITHOUT_TYPE = "has no type, and is read as text"
ONE_PART = "is one part, and read as a list of it"
# Part types that only the other API has, keyed by the field with the messages or items.
_OF_OTHER_API = {
    "messages": {"input_text", "output_text", "input_image", "computer_screenshot"},
    "input": {"text", "image_url"},
}


class ContentReader:
    """Reads the contents of one request, which are in its field `param`."""

    def __init__(self, media: MediaReader, note: Note, param: str) -> None:
        self._media = media
        self._note = note
        self._param = param
        self._of_other_api = _OF_OTHER_API.get(param, set())

    def read(self, content: object, where: str, role: str, *, is_asked: bool) -> str | list[Part]:
        """Return the content of a message. Unreadable parts are refused if the message `is_asked`, which means it is in
        the user's last turn or the system's. Raises InvalidRequest."""
        if content is None:
            self._note(where, "is missing, and read as empty")
            return ""
        if isinstance(content, str):
            return content
        if role == "tool" and not (is_part(content) or has_parts(content)):
            self._note(where, "is read as a text in JSON")
            return msgspec.json.encode(content).decode()
        if isinstance(content, dict):
            self._note(where, ONE_PART)
        parts: list[Part] = []
        for number, part in enumerate(content if isinstance(content, list) else [content]):
            parts += self._part(part, f"{where}[{number}]", role, is_asked=is_asked)
        return parts or ""

    def _part(self, part: Any, where: str, role: str, *, is_asked: bool) -> Iterator[Part]:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(part, str):
            self._note(where, WITHOUT_TYPE)
            yield {"type": "text", "text": part}
        elif not isinstance(kind, str) or ("type" not in part and not isinstance(part.get("text"), str)):
            if is_asked:
                raise invalid(self._param, "must be the type of the part", f"{where}.type")
            self._note(where, "is no part of a message, and left out")
        elif kind in _TEXTS and isinstance(part.get("text"), str):
            if "type" not in part:
                self._note(where, WITHOUT_TYPE)
            elif kind in self._of_other_api:
                self._note(where, f"{kind} is read as text")
            yield {"type": "text", "text": part["text"], **self.more_fields(part, _OF_TEXT, where)}
        elif kind in _TEXTS and is_asked:
            raise invalid(self._param, "must be a string", f"{where}.text")
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            yield {"type": "text", "text": part["refusal"]}
        elif role != "assistant" or not _thought(part):
            yield from self._other(part, where, role, is_asked=is_asked)

    def _other(self, part: Part, where: str, role: str, *, is_asked: bool) -> Iterator[Part]:
        """Yield the medium of a part, or its text, if it has one."""
        medium = MEDIA.get(part["type"])
        if medium is not None and is_asked and role != "user":
            raise invalid(self._param, "images and sounds are in messages of users and in results of tools", where)
        if medium is not None and role in ("user", "tool"):
            try:
                fields = {**part, "type": medium.__struct_config__.tag}
                is_bare = medium is ImagePart and isinstance(part.get("image_url"), str)
                if is_bare or part["type"] in self._of_other_api:
                    self._note(where, "is read in the form of another API")
                yield self._media.part(converted(medium, fields, where), where, self._param, is_asked=is_asked)
                return
            except InvalidRequest:
                if is_asked:
                    raise
        text = text_of(part)
        is_left_out = not text or is_unread(part)
        if is_left_out and is_asked:
            raise invalid(self._param, NOT_READ, where)
        what = "is left out" if is_left_out else "is shown by its text"
        self._note(where, f"{name_of(part)} {what}")
        if part["type"] == "input_file" and part.get("detail") not in (None, "auto"):
            self._note(f"{where}.detail", "is left out: files are read as text")
        if text:
            yield {"type": "text", "text": text}

    def more_fields(self, fields: Mapping[str, Any], known: set[str], where: str) -> dict[str, Any]:
        more = {name: value for name, value in fields.items() if name not in known and value is not None}
        if not more or (len(more) <= _MOST_FIELDS and not is_deep(more, _MOST_DEPTH)):
            return more
        self._note(where, "fields for the template are too many or too deep, and left out")
        return {}


def is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def has_parts(content: object) -> bool:
    return isinstance(content, list) and all(isinstance(part, str) or is_part(part) for part in content)


def thoughts_in(content: object) -> str:
    parts = content if isinstance(content, list) else ()
    return "\n".join(filter(None, map(_thought, parts)))


def _thought(part: object) -> str:
    if isinstance(part, dict) and is_part(part):
        text = part.get(_THOUGHTS.get(part["type"], ""))
        if isinstance(text, str):
            return text
    return ""
