"""The messages between a front end and the engine process, and their bytes: msgpack, by msgspec.

Requests and events travel as they are. A front end may be attacked from outside, so none of its messages is unpickled:
they are checked against the types here.
"""

from __future__ import annotations

import pickle
import struct
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Union, get_type_hints

import msgspec

from oaiserve.config import Config
from oaiserve.engine.adapters import ServedAdapter
from oaiserve.engine.logprobs import TokenLogprobs
from oaiserve.engine.pooling import Pooling
from oaiserve.engine.request import (
    Aborted,
    Event,
    Failed,
    Finished,
    Pooled,
    PromptDone,
    PromptProgress,
    Request,
    TokenChunk,
    TokenPrompt,
)
from oaiserve.engine.text.stored_tokenizer import StoredTokenizer
from oaiserve.errors import APIError, InternalError, kinds_of, restored
from oaiserve.facts.record import EngineAccount, RequestRecord
from oaiserve.facts.trace import TraceContext
from oaiserve.files.adapters import BadAdapter
from oaiserve.routes.responses.store import ConversationTooLarge

if TYPE_CHECKING:
    from oaiserve.engine.engine import Engine  # a front end has none


class Message(msgspec.Struct, array_like=True, tag=True):
    """A message is an array: the name of its class, and its fields."""


# -- the beginning of a front end: a pickled message -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Model:
    """The settings, and a front end's data of the model, its engine and its telemetry."""

    config: Config
    switch_seconds: float  # for which a Python thread may keep the others from running
    tokenizer: StoredTokenizer
    max_model_len: int
    vocab_size: int
    capacity: dict[str, int]
    default_params: dict[str, Any]
    pooling: Pooling | None
    is_on_cpu: bool
    started_unix_seconds: float
    live_boundaries_seconds: dict[str, list[float]]


def _values_type(kind: type, *left_out: str) -> Any:
    """Return a struct with the fields of a dataclass, apart from those that have a form of their own here."""
    fields = [(name, hint) for name, hint in get_type_hints(kind).items() if name not in left_out]
    return msgspec.defstruct(f"{kind.__name__}Values", fields, array_like=True)


def _values_of(filled: object, kind: Any) -> Any:
    return kind(*(getattr(filled, name) for name in kind.__struct_fields__))


if TYPE_CHECKING:
    RequestValues = Any
    RecordValues = Any
else:
    RequestValues = _values_type(Request, "prompts")
    RecordValues = _values_type(RequestRecord, "trace", "account")


# -- from a front end --------------------------------------------------------------------------------------------------


class Submit(Message):
    """A request, whose prompts the front end encodes."""

    num_prompts: int
    submitted_ns: int
    values: RequestValues

    @classmethod
    def of(cls, request: Request, submitted_ns: int) -> Submit:
        return cls(len(request.prompts), submitted_ns, _values_of(request, RequestValues))

    def request(self) -> Request:
        """Return the request as the engine needs it: with prompts that hold nothing, for their ids come later."""
        return Request(prompts=(TokenPrompt(()),) * self.num_prompts, **msgspec.structs.asdict(self.values))


class Recorded(Message):
    """The record of an ended request. The engine process has its account."""

    # Its TraceContext: the trace's id has 128 bits, which no integer of msgpack has.
    trace: tuple[bytes, int, int | None, bool, str | None]
    values: RecordValues

    @classmethod
    def of(cls, record: RequestRecord) -> Recorded:
        trace_id, *rest = astuple(record.trace)
        return cls((trace_id.to_bytes(16), *rest), _values_of(record, RecordValues))

    def record(self, account: EngineAccount) -> RequestRecord:
        trace = TraceContext(int.from_bytes(self.trace[0]), *self.trace[1:])
        return RequestRecord(trace=trace, account=account, **msgspec.structs.asdict(self.values))


class Call(Message):
    """A call of a method that `FrontEnd` offers, with its arguments as an array."""

    method: str
    arguments: msgspec.Raw
    number: int  # of a question, which gets an `Answered` or an `AskFailed` with it; 0 for what has no answer


# -- to a front end ----------------------------------------------------------------------------------------------------


class Events(Message):
    """The events of one step, of all requests of a front end: those of each request and choice in their order."""

    progress: list[PromptProgress]
    prompts: list[PromptDone]
    chunks: list[TokenChunk]
    pooled: list[Pooled]
    finished: list[Finished]
    failed: list[Failed]
    aborted: list[Aborted]

    @classmethod
    def of(cls, events: list[Event]) -> Events:
        message = cls([], [], [], [], [], [], [])
        add = {
            PromptProgress: message.progress.append,
            PromptDone: message.prompts.append,
            TokenChunk: message.chunks.append,
            Pooled: message.pooled.append,
            Finished: message.finished.append,
            Failed: message.failed.append,
            Aborted: message.aborted.append,
        }
        for event in events:
            add[type(event)](event)  # type: ignore[operator]
        return message

    def in_order(self) -> list[Event]:
        """Return the events in order: those of a prompt, those of its choices, the end."""
        ends: list[Event] = [*self.finished, *self.failed, *self.aborted]
        return [*self.progress, *self.prompts, *self.chunks, *self.pooled, *ends]


class State(Message):
    """The state of the engine, which is sent whole when a part of it changes."""

    adapters: list[ServedAdapter]
    is_reporting: bool  # routers ask for reports, so requests have prefix keys
    hang: str  # the part of its work in which it hangs, or nothing
    failure: str  # with which it has ended, or nothing

    @classmethod
    def of(cls, engine: Engine) -> State:
        why = engine.failure
        failure = "" if why is None else f"{type(why).__name__}: {why}"
        return cls(list(engine.adapters.served), engine.is_reporting, engine.hang, failure)


class Shutdown(Message):
    """The shutdown begins; the second time, running requests are not waited for."""


class Answered(Message):
    """The answer to the question with this number."""

    number: int
    value: msgspec.Raw


class AskFailed(Message):
    """The error of the question with this number."""

    number: int
    error: Exception


# -- bytes -------------------------------------------------------------------------------------------------------------

LENGTH = struct.Struct("<I")  # of a message, in front of it
TO_FRONT_END = (Events, State, Shutdown, Answered, AskFailed)


_ERRORS = {
    **kinds_of(APIError),
    BadAdapter.__name__: BadAdapter,
    ConversationTooLarge.__name__: ConversationTooLarge,
}


def _encoded(value: Any) -> Any:
    """Return a substitute for a value of a type unknown to msgspec."""
    if isinstance(value, array):
        return value.typecode, value.tobytes()
    if isinstance(value, TokenLogprobs):
        return [column if isinstance(column, list) else column.tobytes() for column in value.columns]
    if isinstance(value, Exception):
        text = str(value).encode(errors="surrogatepass")  # it may quote half of a surrogate pair
        attributes = vars(value) if isinstance(value, APIError) else {}
        return type(value).__name__, text, *map(attributes.get, ("param", "code", "retry_after_seconds", "forecast"))
    raise NotImplementedError(f"no message has a {type(value).__name__}")


def _decoded(kind: Any, value: Any) -> Any:
    """Return the value of this kind for which another one stands."""
    if kind is array:
        typecode, items = value
        return array(typecode, items)
    if kind is TokenLogprobs:
        ids, texts, logprobs, ends, ranks = value
        return TokenLogprobs((array("i", ids), texts, array("d", logprobs), array("q", ends), array("i", ranks)))
    if isinstance(kind, type) and issubclass(kind, Exception):
        name, text, param, code, retry_after_seconds, forecast = value
        message = text.decode(errors="surrogatepass")
        own: type[Exception] = _ERRORS.get(name, InternalError)
        if not issubclass(own, APIError):
            return own(message) if message else own()
        attributes = {"message": message, "param": param, "code": code, "retry_after_seconds": retry_after_seconds}
        attributes |= {} if forecast is None else {"forecast": forecast}
        return restored(own, (message,), attributes)
    raise NotImplementedError(f"no message has a {kind}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encoded)


def decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of values of this type. It raises msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decoded)


def packed(value: object) -> msgspec.Raw:
    """Return a value as a part of a message whose type is known elsewhere."""
    return msgspec.Raw(_encoder.encode(value))


# These raise msgspec.MsgspecError for anything else than a call, or a message of the engine process.
of_front_end: Callable[[bytes], Call] = decoder_of(Call).decode
of_engine: Callable[[bytes], Message] = decoder_of(Union[TO_FRONT_END]).decode  # noqa: UP007


def framed(message: Message) -> bytearray:
    """Return the bytes of a message, with their number in front."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return frame


def pickled(model: Model) -> bytes:
    """Return the bytes of the first message, with their number in front. For a large tokenizer, this takes a while."""
    body = pickle.dumps(model, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body
