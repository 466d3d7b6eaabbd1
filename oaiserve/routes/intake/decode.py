"""Decodes clients' JSON bodies, and finds refused, ignored and unknown names in them.

This file knows nothing of HTTP. Each refusal is an `InvalidRequest` that names the parameter.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, lru_cache
from itertools import islice
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType, inspect

from oaiserve.errors import InvalidRequest
from oaiserve.gc_pause import paused_for
from oaiserve.routes.adaptations import Note
from oaiserve.routes.intake.invalid import invalid_type, members, show
from oaiserve.routes.intake.wishes import NAMES, WISHES, How, Wish
from oaiserve.wire.surrogates import REPLACEMENT, without_halves

logger = logging.getLogger(__name__)

Fields = Mapping[str, msgspec.Raw]
_MOST_NAMED_BYTES = 2**20  # In larger bodies, not all names are read: millions would take a second, and much memory.
decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
MOST_TOLD = 10  # unknown parameters of a body that are logged
_MOST_COMPARED = 40  # characters of an unknown name that are compared
_SIMILAR = 0.82  # share of the letters that a misspelled name has in common with the intended one
_MOST_NESTED_BYTES = 4096  # bytes of an object whose names are checked
# Parameters with texts that clients pass on, and that others may have cut.
_PASSED_ON = frozenset(
    {
        *("documents", "input", "inputs", "instructions", "items", "messages", "prompt", "queries", "query", "suffix"),
        *("requests", "system", "text_1", "text_2", "texts", "tool_choice", "tools"),
    }
)
_STREAM_OPTIONS = ("include_usage", "include_timings", "continuous_usage_stats", "include_obfuscation")


@lru_cache(256)
def _tell_of(name: str, known: tuple[str, ...]) -> None:
    """Log an unknown parameter once. Clients choose the names, so the cache is limited, and many names may repeat."""
    meant = _meant(name[:_MOST_COMPARED], known)
    question = f". Did they mean {meant}?" if meant else ""
    logger.warning("Clients sent an unknown parameter, which is ignored: %s%s", show(name), question)


Body = TypeVar("Body", bound=msgspec.Struct)


@cache
def decoder_of(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def parse(
    kind: type[Body],
    body: bytes | bytearray,
    check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None = None,
    note: Note | None = None,
) -> Generator[None, None, Body]:
    """Decode a JSON body of this kind and check its types, and yield after each long part. The route checks the ranges.

    `check_given` may refuse a body by its names and the JSON of their values, before these are decoded. Misspelled
    names are noted. Halves of surrogate pairs in texts that clients pass on are replaced in the body and noted. Raises
    InvalidRequest, RecursionError, and the errors of `check_given`.
    """
    try:
        try:
            values, parsed = yield from _decoded(kind, body, check_given)
        except msgspec.DecodeError as error:
            if isinstance(error, msgspec.ValidationError):
                raise
            body = body if isinstance(body, bytearray) else bytearray(body)
            if not (halves := (yield from without_halves(body))):
                raise
            values, parsed = yield from _decoded(kind, body, check_given)
            if note is None or any(REPLACEMENT in bytes(values[name]) for name in values.keys() - _PASSED_ON):
                raise InvalidRequest(
                    f"The body has half of a surrogate pair (byte {halves[0]}), which is no character. Send valid "
                    "Unicode text."
                ) from None
            note("the body", "halves of surrogate pairs are read as U+FFFD")
        _grant_wishes(kind, values, note)  # This decodes values that `kind` has no field for.
    except msgspec.ValidationError as error:
        raise invalid_type(kind, str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid JSON: it is not UTF-8.") from None
    except msgspec.DecodeError as error:
        if not body.strip():
            raise InvalidRequest("The body is empty, and must be a JSON object.") from None
        reason = str(error).removeprefix("JSON is malformed: ")
        raise InvalidRequest(f"The body is not valid JSON: {reason[:1].lower()}{reason[1:]}.") from None
    unknown = values.keys() - set(parsed.__struct_fields__) - NAMES
    for name in islice(unknown, MOST_TOLD):
        _tell_of(name[:61], parsed.__struct_fields__)  # 60 of these characters are shown.
    if note is not None:
        _note_misspelled(kind, values, unknown, note)
    return parsed


def _decoded(
    kind: type[Body], body: bytes | bytearray, check_given: Callable[[Mapping[str, msgspec.Raw]], None] | None
) -> Generator[None, None, tuple[Mapping[str, msgspec.Raw], Body]]:
    """Return the values of a body by name, and the body. Raises msgspec's errors and those of `check_given`."""
    decoder = decoder_of(kind)
    try:
        values = fields_of(kind, body)
    except msgspec.DecodeError:
        decoder.decode(body)  # This decoder has the better error message.
        raise
    if check_given is not None:
        check_given(values)
    yield
    with paused_for(len(body)):
        parsed: Body = decoder.decode(body)
    yield
    return values, parsed


def fields_of(kind: type[msgspec.Struct], body: bytes | bytearray) -> Fields:
    """Return the JSON of the fields of a body of this kind. A large body keeps only the first of its unknown names.

    The values are views of the body: copy what is kept. Raises msgspec.DecodeError and RecursionError.
    """
    if len(body) <= _MOST_NAMED_BYTES:
        return decode_names(body)
    known = msgspec.structs.asdict(_names_decoder(kind, is_strict=False).decode(body))
    fields = {name: value for name, value in known.items() if value is not UNSET}
    try:
        _names_decoder(kind, is_strict=True).decode(body)
    except msgspec.ValidationError as error:
        fields[str(error).partition("`")[2].rpartition("`")[0]] = msgspec.Raw(b"null")
    return fields


@cache
def _names_decoder(kind: type[msgspec.Struct], *, is_strict: bool) -> msgspec.json.Decoder[msgspec.Struct]:
    names = {*kind.__struct_fields__, *NAMES}
    fields = [(name, msgspec.Raw | UnsetType, UNSET) for name in sorted(names)]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=is_strict))


@cache
def _wishes_of(kind: type[msgspec.Struct]) -> Mapping[str, tuple[re.Pattern[bytes], list[tuple[Wish, list[str]]]]]:
    """Return the rows that may refuse or note something in bodies of this kind, by parameter, each with the steps from
    the parameter to its field. The pattern matches the JSON of every value that has one of these fields."""
    rows: dict[str, list[tuple[Wish, list[str]]]] = {}
    for wish in WISHES:
        name, *steps = wish.steps
        if wish.how is not How.NOTHING and (wish.is_typed or not reads(kind, wish.path)):
            rows.setdefault(name, []).append((wish, steps))
    return {name: (_pattern_of([steps for _, steps in each]), each) for name, each in rows.items()}


def _pattern_of(places: Sequence[Sequence[str]]) -> re.Pattern[bytes]:
    if not all(places):  # One of them is the value itself.
        return re.compile(b"")
    return re.compile(f'"(?:{"|".join(sorted({steps[-1] for steps in places}))})"'.encode())


def _grant_wishes(kind: type[msgspec.Struct], values: Mapping[str, msgspec.Raw], note: Note | None) -> None:
    """Refuse or note the wishes in a body of this kind, whose values are given in JSON. Raises InvalidRequest and
    msgspec's errors."""
    for name, (pattern, rows) in _wishes_of(kind).items():
        if name not in values or pattern.search(values[name]) is None:
            continue
        value = msgspec.json.decode(values[name])
        for wish, steps in rows:
            if all(each is None or each in wish.harmless for each in _at(value, steps)):
                continue
            if wish.how is How.REFUSED:
                hint = wish.hint or "Please leave it out."
                message = f"'{wish.path}' is not supported here. {hint}"
                raise InvalidRequest(message, param=wish.path, code="unsupported_parameter")
            if note is not None:
                note(wish.path, wish.hint)


def _at(value: Any, steps: Iterable[str]) -> list[Any]:
    """Return the values at a place: several if it is within the entries of a list."""
    values = [value]
    for step in steps:
        if step == "[]":
            values = [entry for each in values if isinstance(each, list) for entry in each]
        else:
            values = [each.get(step) for each in values if isinstance(each, dict)]
    return values


def _note_misspelled(
    kind: type[msgspec.Struct], values: Mapping[str, msgspec.Raw], unknown: Iterable[str], note: Note
) -> None:
    where = {"": (unknown, kind.__struct_fields__)}
    for option, known in _options_of(kind).items():
        value = bytes(values.get(option, b""))
        if value.startswith(b"{") and len(value) <= _MOST_NESTED_BYTES:
            where[f"{option}."] = (decode_names(value).keys() - known, known)
    for prefix, (names, known) in where.items():
        for name in islice(names, MOST_TOLD):
            if (meant := _meant(name[:_MOST_COMPARED], known)) is not None:
                note(f"{prefix}{meant}", "an unknown parameter with a similar name is ignored")


@lru_cache(256)
def _meant(name: str, known: tuple[str, ...]) -> str | None:
    """Return the known name that is probably meant, ignoring case and underscores."""
    plain = {each.replace("_", ""): each for each in known}
    matches = get_close_matches(re.sub("[_-]", "", name).lower(), plain, 1, _SIMILAR)
    if matches:
        return plain[matches[0]]
    return None


def reads(kind: type[msgspec.Struct], path: str) -> bool:
    """Return whether the type of a body has a field, such as text.format."""
    name, _, inner = path.partition(".")
    return name in kind.__struct_fields__ and (not inner or inner in _options_of(kind).get(name, ()))


@cache
def _options_of(kind: type[msgspec.Struct]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the parameters of a body that are objects of one kind."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    types_by_name = {
        field.name: [each for each in members(field.type) if not isinstance(each, inspect.NoneType)]
        for field in info.fields
    }
    options = {
        name: tuple(field.encode_name for field in types[0].fields)
        for name, types in types_by_name.items()
        if len(types) == 1 and isinstance(types[0], inspect.StructType)
    }
    return options | ({"stream_options": _STREAM_OPTIONS} if "stream_options" in types_by_name else {})


def num_ids(value: msgspec.Raw | None) -> int:
    """Return the length of a list of ids, by counting in the JSON; 0 if there are texts, lists or objects in it.

    This takes a few milliseconds for a million ids. Decoding them takes forty, and blocks all other threads. An empty
    list counts as one id.
    """
    text = memoryview(value or b"").tobytes()
    is_flat = text[:1] == b"[" and text.find(b"[", 1) == text.find(b'"') == text.find(b"{") == -1
    if is_flat:
        return text.count(b",") + 1
    return 0
