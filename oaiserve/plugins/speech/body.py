"""The fields of the forms, and the table of what becomes of each field of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import msgspec

from oaiserve.errors import InvalidRequest
from oaiserve.routes.adaptations import Note
from oaiserve.routes.intake.forms import Form
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.operation import Parameter

Task = Literal["transcribe", "translate"]
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
Granularity = Literal["word", "segment"]
FORMATS: tuple[str, ...] = get_args(Format)
GRANULARITIES: tuple[str, ...] = get_args(Granularity)
_NO_SPEAKERS = "the model does not tell speakers apart"


class Field(NamedTuple):
    """A field of a form: what it means, or why it is refused or left out. One of these alone is given."""

    meaning: str = ""
    refused: str = ""
    left_out: str = ""
    harmless: tuple[str, ...] = ()  # values that wish for nothing
    allowed: tuple[str, ...] | None = None


FIELDS: Mapping[str, Field] = {
    "file": Field("The sound: FLAC, M4A, MP3, MP4, Ogg, WAV or WebM."),
    "model": Field("The served model. Default: the one there is."),
    "language": Field("The language that is spoken, as in `en`. Default: the likeliest one in the first 30 seconds."),
    "prompt": Field("A text before the speech, whose spelling and style the answer follows."),
    "response_format": Field("Default: json.", allowed=FORMATS),
    "temperature": Field(
        "From 0 to 1. Default: 0, or more where that yields a text that is unlikely or repeats itself."
    ),
    "timestamp_granularities": Field(
        "`segment`, `word` or both, for verbose_json. Default: segment.", allowed=GRANULARITIES
    ),
    "stream": Field("true: send the text of each part of the sound as an event, with json or text."),
    "seed": Field("Makes draws with a temperature the same each time."),
    "chunking_strategy": Field(left_out="longer sounds are cut where they are quiet", harmless=("auto",)),
    "include": Field(refused="there are no log-probabilities of tokens; verbose_json has the mean of a segment"),
    "keywords": Field(left_out="put them into 'prompt'"),
    "languages": Field(left_out="use 'language'"),
    "known_speaker_names": Field(refused=_NO_SPEAKERS),
    "known_speaker_references": Field(refused=_NO_SPEAKERS),
}
NOT_OF_TRANSLATIONS = ("language", "timestamp_granularities", "stream")  # OpenAI's route has no such fields.


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
    timestamp_granularities: tuple[Granularity, ...] = ("segment",)
    stream: bool = False
    seed: int | None = None
    priority: int | None = None


def read_body(form: Form, task: Task, note: Note) -> SpeechBody:
    """Check the fields of a form. Those that are left out are noted. Raises InvalidRequest."""
    if "file" not in form.files:
        raise InvalidRequest("The form must have the field 'file', with a sound file.", param="file")
    for name, values in form.fields.items():
        field = FIELDS.get(name)
        if field is None:
            note("form", "unknown fields are left out")
        elif all(value in field.harmless for value in values):
            continue
        elif field.refused:
            raise invalid(name, f"is not supported: {field.refused}")
        elif field.left_out:
            note(name, f"is left out: {field.left_out}")
    given = {name: values[-1].strip() for name, values in form.fields.items() if any(map(str.strip, values))}
    language = given.get("language")
    if task == "translate" and language is not None:
        note("language", "is left out: the model finds it out")
        language = None
    granularities = form.fields.get("timestamp_granularities", [])
    for value in granularities:
        _one_of("timestamp_granularities", value, GRANULARITIES)
    chosen = _one_of("response_format", given.get("response_format", "json"), FORMATS)
    if granularities and chosen != "verbose_json":
        raise invalid("timestamp_granularities", f"needs the response_format verbose_json, got {show(chosen)}")
    stream = _is_true(given.get("stream", "false"))
    if stream and chosen not in ("json", "text"):
        raise invalid("stream", f"needs the response_format json or text, got {show(chosen)}")
    return SpeechBody(
        task=task,
        sound=form.files["file"],
        model=given.get("model"),
        language=language,
        prompt=given.get("prompt", ""),
        response_format=chosen,  # type: ignore[arg-type]
        temperature=_temperature(given.get("temperature", "0")),
        timestamp_granularities=tuple(granularities) or ("segment",),  # type: ignore[arg-type]
        stream=stream,
        seed=_seed(given.get("seed")),
    )


def _one_of(name: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise invalid(name, f"must be one of {', '.join(allowed)}, got {show(value)}")
    return value


def _is_true(value: str) -> bool:
    # Python's clients write True, and others 1.
    return _one_of("stream", value.lower(), ("true", "false", "1", "0")) in ("true", "1")


def _temperature(value: str) -> float:
    try:
        temperature = float(value)
    except ValueError:
        temperature = -1.0
    if not 0 <= temperature <= 1:
        raise invalid("temperature", f"must be a number from 0 to 1, got {show(value)}")
    return temperature


def _seed(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 19):
        raise invalid("seed", f"must be an integer from 0 to 10^18, got {show(value)}")
    return int(value)
