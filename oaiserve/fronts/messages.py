"""The messages between the main process of a server and its front processes, as plain data.

Generation uses the messages between a front and an engine process, since the main process acts as the engine of its
front processes. The other messages carry settings, records, statistics and forwarded requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from oaiserve.config import Config, EngineOptions, ServerOptions, TelemetryOptions
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.facts.record import AccessRefusal, RequestRecord
from oaiserve.facts.trace import TraceContext
from oaiserve.facts.turn import Turn, TurnPrompt
from oaiserve.process.messages import Abort, Answer, AskTokenizer, AskTokens, Ready, Step, Stop, Submit
from oaiserve.process.plain_data import convert

Headers = list[tuple[bytes, bytes]]

_hints = get_type_hints(RequestRecord)
_RECORD_FIELDS = tuple(each.name for each in fields(RequestRecord) if each.name not in ("trace", "turn"))
# The fields of a record, except for those that contain functions or numbers of more than 64 bits.
_RecordFields = msgspec.defstruct("_RecordFields", [(name, _hints[name]) for name in _RECORD_FIELDS])


class Begin(msgspec.Struct, tag=True, kw_only=True):
    """Serve. This is the first message to a front process."""

    name: str  # shown in log lines
    model: str
    server: ServerOptions
    engine: EngineOptions
    telemetry: TelemetryOptions
    file: Path | None
    of_plugins: dict[str, Any]  # plug-ins' settings, keyed by the names of their types
    ready: Ready

    @classmethod
    def of(cls, name: str, config: Config, ready: Ready) -> Begin:
        return cls(
            name=name,
            model=config.model,
            server=config.server,
            engine=config.engine,
            telemetry=config.telemetry,
            file=config.file,
            of_plugins={_name_of(type(each)): each for each in config.of_plugins},
            ready=ready,
        )

    def config(self, kinds: Iterable[type]) -> Config:
        """Return the server's settings. `kinds` are the types of the plug-ins' settings."""
        of_plugins: list[Any] = [
            convert(self.of_plugins[_name_of(kind)], kind) for kind in kinds if _name_of(kind) in self.of_plugins
        ]
        return Config(self.model, self.server, self.engine, self.telemetry, self.file, tuple(of_plugins))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Facts(msgspec.Struct, tag=True):
    """Facts about the engine that may change, and that the generating routes need."""

    adapters: list[ServedAdapter]
    is_reporting: bool


class Drain(msgspec.Struct, tag=True):
    """Accept no more requests, and exit after the open ones. A second `Drain` means not to wait for them."""


class _Turn(msgspec.Struct):
    """A `Turn` with its prompt already built."""

    run: str
    is_named: bool
    agent: str
    written_tokens: int
    prompt: TurnPrompt
    user_agent: str

    @classmethod
    def of(cls, turn: Turn) -> _Turn:
        return cls(turn.run, turn.is_named, turn.agent, turn.written_tokens, turn.prompt(), turn.user_agent)

    def turn(self) -> Turn:
        return Turn(self.run, self.is_named, self.agent, self.written_tokens, lambda: self.prompt, self.user_agent)


class Record(msgspec.Struct, tag=True):
    """The record of an ended request. Building it may take a millisecond."""

    fields: _RecordFields  # type: ignore[valid-type]
    trace: tuple[str, int, int | None, bool, str | None]
    turn: _Turn | None

    @classmethod
    def of(cls, record: RequestRecord) -> Record:
        named = {name: getattr(record, name) for name in _RECORD_FIELDS}
        named["params"] = {name: _within_64_bits(value) for name, value in record.params.items()}
        trace = record.trace
        ids = trace.trace_id_hex, trace.span_id, trace.parent_span_id, trace.parent_sampled, trace.tracestate
        return cls(_RecordFields(**named), ids, None if record.turn is None else _Turn.of(record.turn))

    def record(self) -> RequestRecord:
        trace_id, *others = self.trace
        named = {name: getattr(self.fields, name) for name in _RECORD_FIELDS}
        turn = None if self.turn is None else self.turn.turn()
        return RequestRecord(trace=TraceContext(int(trace_id, 16), *others), turn=turn, **named)  # type: ignore[arg-type]


def _within_64_bits(value: str | float) -> str | float:
    return float(value) if isinstance(value, int) and not -(2**63) <= value < 2**64 else value


class Lag(msgspec.Struct, tag=True):
    """A measurement of the event loop's lag."""

    seconds: float


class Refused(msgspec.Struct, tag=True):
    """A request was refused before it reached a route."""

    reason: AccessRefusal


class Beat(msgspec.Struct, tag=True):
    """Statistics of a front process, sent once a second."""

    cores_ns: int = 0
    num_connections: int = 0
    refused: dict[str, int] = {}
    refusal_delay_ns: int = 0


class AskFile(msgspec.Struct, tag=True):
    """Read an uploaded file of a client, if there is one."""

    number: int
    owner: str
    file_id: str


# A request that the main process answers. All messages about it have its number.


class Call(msgspec.Struct, tag=True, kw_only=True):
    number: int
    http_version: str
    method: str
    scheme: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    upgrade: str = ""  # the requested protocol; the connection cannot switch to it


class Receive(msgspec.Struct, tag=True):
    """Send the next part of the body, or report that the client has left."""

    number: int


class Received(msgspec.Struct, tag=True):
    number: int
    body: bytes
    more_body: bool
    has_left: bool


class Sent(msgspec.Struct, tag=True):
    """Send a part of the answer: the status with headers, or else a part of the body."""

    number: int
    status: int
    headers: Headers
    body: bytes
    more_body: bool


class Taken(msgspec.Struct, tag=True):
    """The front process has written the part to the client's connection and has room for the next one."""

    number: int


class Cancel(msgspec.Struct, tag=True):
    """End the answer: the front process shuts down."""

    number: int


class Cut(msgspec.Struct, tag=True):
    """Cut the connection."""

    number: int


class CallEnded(msgspec.Struct, tag=True):
    number: int
    is_broken: bool


OfCall = Call | Received | Taken | Cancel
FromFront = Submit | Abort | Stop | AskTokens | AskTokenizer | AskFile | Record | Lag | Refused | Beat | OfCall
ToCall = Receive | Sent | Cut | CallEnded
ToFront = Begin | Facts | Drain | Step | Answer | ToCall
