"""The types of the accounts that /debug/requests sends, for the published schema. Telemetry makes the entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec

from oaiserve.facts.fact import facts_of
from oaiserve.facts.record import EngineAccount, Outcome, RequestRecord, ToolCallOutcome


class AccountPhase(msgspec.Struct):
    """A phase of a request. It starts so long after the request was received; `share` is of the whole duration. Of
    prefill and decode, the causes add up to the duration."""

    name: str
    start_ns: int
    duration_ns: int
    duration_ms: float
    share: float
    causes_ns: dict[str, int]


_JSON_TYPES: dict[Any, Any] = {  # of values that have another type in JSON
    Outcome: str,
    tuple[str, ...]: list[str],
    Mapping[ToolCallOutcome, int]: dict[str, int],
    Mapping[str, str | int | float | bool]: dict[str, Any],
    Mapping[str, str | int | float]: dict[str, Any],
}
_HINTS = (
    (row, get_type_hints(record)[row.name]) for record in (RequestRecord, EngineAccount) for row in facts_of(record)
)
_FACTS = {row.json: _JSON_TYPES.get(hint, hint) for row, hint in _HINTS if row.json}
_FACTS["grammar.kind"] = str  # without a kind, there is no object
AccountGrammar = msgspec.defstruct(
    "AccountGrammar",
    [(name.removeprefix("grammar."), kind) for name, kind in _FACTS.items() if "." in name],
    namespace={"__doc__": "The grammar that constrained an answer, without its text."},
)
if TYPE_CHECKING:
    Account = Any
else:
    Account = msgspec.defstruct(
        "Account",
        [
            *((name, kind) for name, kind in _FACTS.items() if "." not in name),
            ("grammar", AccountGrammar | None),
            ("trace_id", str),
            ("received_unix_ns", int),
            ("duration_ns", int),
            ("duration_ms", float),
            ("time_to_first_token_ns", int | None),
            ("phases", list[AccountPhase]),
            ("queue_waits_ns", dict[str, int]),
            ("token_gaps", dict[str, Any] | None),
            ("mean_event_tokens", float | None),
            ("steps", dict[str, Any] | None),
        ],
        namespace={"__doc__": "The account of a request that has ended."},
    )


class AccountEvent(msgspec.Struct):
    """An event of a request in the engine, with its time since the request was received."""

    name: str
    at_ns: int
    at_ms: float
    choice: int | None
    details: dict[str, Any]


class SharedPhase(msgspec.Struct):
    """A phase of a neighbour, which starts so long after the request was received."""

    name: str
    start_ns: int
    duration_ns: int


class Neighbour(msgspec.Struct):
    """Another request that took part in the same steps."""

    request_id: str
    operation: str
    prompt_tokens: int
    completion_tokens: int
    num_shared_steps: int
    phases: list[SharedPhase]


WholeAccount = msgspec.defstruct(
    "WholeAccount",
    [
        ("explanation", list[str]),
        ("events", list[AccountEvent]),
        ("num_events_dropped", int),
        ("num_neighbours", int),
        ("neighbours", list[Neighbour]),
    ],
    bases=(Account,),
    namespace={
        "__doc__": "The account of a request, with why it took so long, its events, and the requests that shared its "
        "steps."
    },
)


class AccountList(msgspec.Struct):
    """The accounts of the last requests."""

    requests: list[Account]
