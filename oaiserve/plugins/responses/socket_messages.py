"""Messages of a client and the server on a socket: requests, input that steers, and events about errors.

A message is read in turns with the bodies of other clients, and no objects are made of names that the client makes up.
A request that waits is held as bytes only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from oaiserve.errors import APIError, InvalidRequest
from oaiserve.http.fair_turns import Work
from oaiserve.plugins.responses.body import PromptCacheOptions, ResponsesBody
from oaiserve.routes.intake.decode import decoder_of, fields_of
from oaiserve.routes.intake.invalid import invalid_type
from oaiserve.wire.surrogates import as_sent, without_halves

MOST_STEER_BYTES = 2**20
MOST_ID_CHARACTERS = 256
_STREAM_ID = re.compile(rf"[A-Za-z0-9_.-]{{1,{MOST_ID_CHARACTERS}}}")
_encode = msgspec.json.encode
Content = bytes | bytearray
Result = TypeVar("Result")


class _Head(msgspec.Struct):
    """The fields of a message that choose its lane and how it is read."""

    type: str
    stream_id: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    conversation: msgspec.Raw = msgspec.Raw()


class CreateBody(ResponsesBody, kw_only=True):
    """The body of a request, with the fields that only messages have."""

    type: str
    stream_id: str | None = None
    generate: bool | None = None


class _SteerBody(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a message that steers."""

    type: str
    previous_response_id: str | None = None
    input: msgspec.Raw = msgspec.Raw()


class _Part(msgspec.Struct):
    """A part of a content, which the route reads."""

    type: str


class _UserMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the user for a running response."""

    role: str
    content: str | list[_Part]
    type: str = "message"


class Create(NamedTuple):
    """A request that waits or runs: the message itself, and what its lane needs."""

    message: Content
    stream_id: str | None
    previous_response_id: str  # cut, as no longer one exists
    is_of_conversation: bool
    items: bytes | None = None  # replaces the message's input after a steered response

    @property
    def num_bytes(self) -> int:
        return len(self.message) + len(self.items or b"")


class Steer(NamedTuple):
    """Input for a running response."""

    previous_response_id: str
    given: bytes  # the JSON of its input, as the client has sent it
    items: bytes = b""
    problem: str = ""  # why it can't steer; empty if it can


class Sent(NamedTuple):
    """The body of a request to the server, and the id of the stored response that it continues, in JSON."""

    body: bytes
    previous: bytes


def read_message(message: Content) -> Work[Create | Steer]:
    """Read a message of the client. Raises InvalidRequest and RecursionError."""
    head, readable = yield from _read(message, decoder_of(_Head).decode)
    yield None
    if head.type == "response.create":
        if head.stream_id is not None and _STREAM_ID.fullmatch(head.stream_id) is None:
            text = f"Invalid 'stream_id': must be 1 to {MOST_ID_CHARACTERS} letters, digits, '_', '-' or '.'."
            raise InvalidRequest(text, param="stream_id")
        if head.background:
            raise InvalidRequest("Invalid 'background': is not supported on a WebSocket.", param="background")
        is_of_conversation = bytes(memoryview(head.conversation)[:5]) not in (b"", b"null")
        return Create(message, head.stream_id, _cut(head.previous_response_id), is_of_conversation)
    if head.type == "response.steer":
        return _steer(readable, _cut(head.previous_response_id))
    text = f"The type of an event must be 'response.create' or 'response.steer', got {head.type[:100]!r}."
    raise InvalidRequest(text, param="type")


def _cut(response_id: str | None) -> str:
    return (response_id or "")[: MOST_ID_CHARACTERS + 1]


def _read(message: Content, decode: Callable[[Content], Result]) -> Work[tuple[Result, Content]]:
    """Return the decoded message and the text that was decoded: without halves of surrogate pairs, which
    the route replaces and notes. Raises InvalidRequest and RecursionError."""
    try:
        try:
            return decode(message), message
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            readable = bytearray(message)
            if isinstance(error, msgspec.ValidationError) or not (yield from without_halves(readable)):
                raise
            return decode(readable), readable
    except msgspec.ValidationError as error:
        wrong = invalid_type(_Head, str(error))
        if wrong.param is not None:
            raise wrong from None
        raise InvalidRequest("A message must be a JSON object with a 'type'.", param="type") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"A message must be a JSON object with a 'type': {error}.", param="type") from None


class _Input(msgspec.Struct):
    input: msgspec.Raw = msgspec.Raw(b"null")


_decode_input = decoder_of(_Input).decode


def _steer(message: Content, previous_response_id: str) -> Steer:
    """Return the input in a message, which is readable."""
    steer = Steer(previous_response_id, bytes(_decode_input(message).input))
    if len(message) > MOST_STEER_BYTES:
        return steer._replace(problem=f"Input that steers has at most {MOST_STEER_BYTES} bytes.")
    try:
        decoder_of(_SteerBody).decode(message)
    except msgspec.ValidationError as error:
        name = str(error).partition("`")[2].rpartition("`")[0]
        return steer._replace(problem=f"'response.steer' takes no {name[:100]!r}.")
    try:
        value = msgspec.json.decode(steer.given, type=str | list[_UserMessage])
    except msgspec.ValidationError as error:
        return steer._replace(problem=f"Invalid 'input': {error}")
    if not value or any(each.role != "user" for each in value if isinstance(each, _UserMessage)):
        return steer._replace(problem="Invalid 'input': must hold a text, or messages of the user.")
    return steer._replace(items=items_of(steer.given))


def items_of(value: bytes | msgspec.Raw) -> bytes:
    """Return the items of an input, or of an output, as JSON: the inside of the list. A text is an item of the user.
    Raises InvalidRequest."""
    text = bytes(value).strip()
    if text.startswith(b"["):
        return text[1:-1].strip()
    if text.startswith(b'"'):
        return b'{"type":"message","role":"user","content":%b}' % text
    if text in (b"", b"null"):
        return b""
    raise InvalidRequest("Invalid 'input': must be a string or a list.", param="input")


def joined(parts: Iterable[bytes]) -> bytes:
    """Return the items of all parts."""
    return b",".join(part for part in parts if part)


def as_list(items: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % items)


def body_of(create: Create, previous: bytes, earlier: bytes) -> Work[Sent]:
    """Return the body of a request for the server. `previous` is the id of a response in JSON instead of the message's,
    or empty, and `earlier` are the items before those of its input. Raises InvalidRequest and RecursionError."""
    read, readable = yield from _read(create.message, partial(fields_of, CreateBody))
    yield None
    fields = dict(read)
    if readable is not create.message:
        for name, value in read.items():
            fields[name] = msgspec.Raw(as_sent(bytes(value), readable, create.message))
    for name in ("type", "stream_id"):
        fields.pop(name, None)
    if bytes(fields.pop("generate", b"")) == b"false":
        fields["prompt_cache_options"] = _with_prewarm(fields.get("prompt_cache_options"))
    fields["stream"] = msgspec.Raw(b"true")
    if previous:
        fields["previous_response_id"] = msgspec.Raw(previous)
    if create.items is not None or earlier:
        own = create.items if create.items is not None else items_of(fields.get("input", b""))
        fields["input"] = as_list(joined((earlier, own)))
    yield None
    return Sent(_encode(fields), bytes(fields.get("previous_response_id", b"null")))


def _with_prewarm(value: msgspec.Raw | None) -> msgspec.Raw:
    """Return options with which only the prompt is computed. Raises InvalidRequest."""
    try:
        options = msgspec.json.decode(value or b"null", type=PromptCacheOptions | None)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid 'prompt_cache_options': {error}.", param="prompt_cache_options") from None
    given = {} if options is None else msgspec.structs.asdict(options)
    given = {name: each for name, each in given.items() if each is not None}
    return msgspec.Raw(_encode({**given, "prewarm": True}))


def own_items(create: Create) -> Work[bytes]:
    """Return a copy of the items in the input of a request."""
    if create.items is not None:
        return create.items
    read, readable = yield from _read(create.message, _decode_input)
    return items_of(as_sent(bytes(read.input), readable, create.message))


def error_event(error: APIError) -> bytes:
    return _encode({"type": "error", "status": error.status, **error.body()})


def steer_failed(code: str, message: str, response_id: str, given: msgspec.Raw, steer_id: str = "") -> bytes:
    """Return the event that gives input back to the client because it can't steer a response."""
    error = {"type": "invalid_request_error", "code": code, "message": message}
    steer: dict[str, object] = {"id": steer_id} if steer_id else {}
    steer |= {"previous_response_id": response_id, "input": given}
    return _encode({"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer})
