"""The types of the accounts that /debug/requests sends, for the published schema. Telemetry makes the entries."""

from __future__ import annotations

from typing import Any

import msgspec


class AccountPhase(msgspec.Struct):
    """A phase of a request. It starts so long after the request was received; `share` is of the whole duration. Of
    prefill and decode, the causes add up to the duration."""

    name: str
    start_ns: int
    duration_ns: int
    duration_ms: float
    share: float
    causes_ns: dict[str, int]


class AccountGrammar(msgspec.Struct):
    """The grammar that constrained an answer, without its text."""

    kind: str
    cache: str | None
    compile_ns: int | None
    num_masked_draws: int
    num_forced_tokens: int


class Account(msgspec.Struct):
    """The account of a request that has ended."""

    request_id: str
    trace_id: str
    response_id: str | None
    conversation_id: str | None
    operation: str
    model: str
    client: str | None
    stream: bool
    outcome: str
    status: int | None
    error_type: str | None
    finish_reasons: list[str]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    num_preemptions: int
    stalled_ns: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_model_draft_tokens: int
    num_accepted_model_tokens: int
    grammar: AccountGrammar | None
    tool_calls: dict[str, int]
    params: dict[str, Any]
    routing: dict[str, Any]  # the decision of the router that chose this server, if there is one
    received_unix_ns: int
    duration_ns: int
    duration_ms: float
    time_to_first_token_ns: int | None
    phases: list[AccountPhase]
    queue_waits_ns: dict[str, int]
    token_gaps: dict[str, Any] | None
    steps: dict[str, Any] | None


class AccountEvent(msgspec.Struct):
    """Something that the engine noted about a request, so long after it was received."""

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


class WholeAccount(Account):
    """The account of a request, with why it took so long, what happened to it, and the requests that shared its
    steps."""

    explanation: list[str]
    events: list[AccountEvent]
    num_events_dropped: int
    num_neighbours: int
    neighbours: list[Neighbour]


class AccountList(msgspec.Struct):
    """The accounts of the last requests."""

    requests: list[Account]
