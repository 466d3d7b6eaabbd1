"""The fields of the forms, and the table of what becomes of each field of OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.plugins.shared.forms import Form
from oaiserve.routes.adaptations import Note
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.operation import Parameter

Task = Literal["transcribe", "translate"]
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
Number = TypeVar("Number", int, float)
_TRUE = ("true", "True", "1")  # Python's clients write True.
_NO_SPEAKERS = "the model does not tell speakers apart"


class Field(NamedTuple):
    """A field of a form: what it means, or why it is refused or left out. Exactly one of these is set."""

    meaning: str = ""
    refused: str = ""
    left_out: str = ""
    harmless: tuple[str, ...] = ()  # values that change nothing
    allowed: tuple[str, ...] | None = None


FIELDS: Mapping[str, Field] = {
    "file": Field("The sound: FLAC, M4A, MP3, MP4, Ogg, WAV or WebM."),
    "model": Field("The served model. Default: the one there is."),
    "language": Field("The language that is spoken, as in `en`. Default: the likeliest one in the first 30 seconds."),
    "prompt": Field("A text before the speech, whose spelling and style the answer follows."),
    "response_format": Field("Default: json.", allowed=get_args(Format)),
    "temperature": Field(
        "From 0 to 1. Default: 0, or more where that yields a text that is unlikely or repeats itself."
    ),
    "timestamp_granularities": Field(
        "`segment`, `word` or both, for verbose_json. Default: segment.", allowed=("word", "segment")
    ),
    "stream": Field(
        "true: send the text of each part of the sound as an event, with json or text.",
        allowed=(*_TRUE, "false", "False", "0"),
    ),
    "seed": Field("Makes draws with a temperature the same each time."),
    "chunking_strategy": Field(left_out="longer sounds are cut where they are quiet", harmless=("auto",)),
    "include": Field(refused="there are no log-probabilities of tokens; verbose_json has the mean of a segment"),
    "keywords": Field(left_out="put them into 'prompt'"),
    "languages": Field(left_out="use 'language'"),
    "known_speaker_names": Field(refused=_NO_SPEAKERS),
    "known_speaker_references": Field(refused=_NO_SPEAKERS),
}


def parameters(task: Task) -> tuple[Parameter, ...]:
    """Return the fields that a route obeys, for its description."""
    return tuple(
        Parameter(name, field.meaning, field.allowed, is_file=name == "file", is_optional=name != "file")
        for name, field in FIELDS.items()
        if field.meaning and not (task == "translate" and name == "language")
    )


class SpeechBody(msgspec.Struct, frozen=True, kw_only=True):
    """A checked form."""

    task: Task
    sound: bytes
    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Format = "json"
    temperature: float = 0.0
    timestamp_granularities: Sequence[str] = ("segment",)
    stream: bool = False
    seed: int | None = None
    priority: int | None = None


def read_body(form: Form, task: Task, note: Note) -> SpeechBody:
    """Check the fields of a form. Those that are left out are noted. Raises InvalidRequest."""
    if "file" not in form.files:
        raise InvalidRequest("The form must have the field 'file', with a sound file.", param="file")
    given: dict[str, list[str]] = {}
    for name, texts in form.fields.items():
        field = FIELDS.get(name)
        if field is None:
            note("form", "unknown fields are left out")
            continue
        values = [text for text in map(str.strip, texts) if text and text not in field.harmless]
        for value in values:
            if field.refused:
                raise invalid(name, f"is not supported: {field.refused}")
            if field.allowed is not None and value not in field.allowed:
                raise invalid(name, f"must be one of {', '.join(field.allowed)}, got {show(value)}")
        if values and (field.left_out or (task == "translate" and name == "language")):
            note(name, f"is left out: {field.left_out or 'the model finds it out'}")
        elif values:
            given[name] = values
    last: dict[str, Any] = {name: values[-1] for name, values in given.items()}
    response_format = last.get("response_format", "json")
    stream = last.get("stream", "false") in _TRUE
    if "timestamp_granularities" in given and response_format != "verbose_json":
        raise invalid("timestamp_granularities", f"needs the response_format verbose_json, got {response_format}")
    if stream and response_format not in ("json", "text"):
        raise invalid("stream", f"needs the response_format json or text, got {response_format}")
    return SpeechBody(
        task=task,
        sound=form.files["file"],
        model=last.get("model"),
        language=last.get("language"),
        prompt=last.get("prompt", ""),
        response_format=response_format,
        temperature=_number("temperature", last.get("temperature", "0"), float, 1, "a number from 0 to 1"),
        timestamp_granularities=given.get("timestamp_granularities", ["segment"]),
        stream=stream,
        seed=_number("seed", last["seed"], int, 10**18, "an integer from 0 to 10^18") if "seed" in last else None,
    )


def _number(name: str, text: str, kind: Callable[[str], Number], most: int, wanted: str) -> Number:
    with suppress(ValueError):
        if 0 <= (number := kind(text)) <= most:
            return number
    raise invalid(name, f"must be {wanted}, got {show(text)}")
