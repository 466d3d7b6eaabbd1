"""A ring buffer of the latest request records, for /debug/requests and the live page. It knows no HTTP."""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Any, NamedTuple

from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import POOLING_OPERATIONS, OthersTime, Outcome, RequestRecord
from oaiserve.facts.times import EpochOffset
from oaiserve.telemetry.explanation import num_shared, sentences
from oaiserve.telemetry.record_facts import TokenGaps, json_of, mean_event_tokens, phase_row, steps_of, token_gaps
from oaiserve.telemetry.targets import Targets

MOST_NEIGHBOURS = 20  # requests listed as neighbours of one request
_WORD = re.compile(r"[\w.-]*[\w-]", re.ASCII)  # a word or a request id, without a full stop at its end, as in linked.js
NOT_SERVED = (Outcome.REJECTED, Outcome.FAILED)
# Maps the names in a row of a list to the fields of a record.
_IN_ROWS = {
    **{name: name for name in ("request_id", "operation", "outcome", "error_type", "model", "client", "stream")},
    **{name: name for name in ("prompt_tokens", "cached_tokens", "completion_tokens")},
    "status": "http_status",
    "route": "http_route",
}
_row_facts = attrgetter(*_IN_ROWS.values())

Entry = dict[str, Any]
Entries = list[Entry]


OpenRequests = Callable[[int, str | None], dict[str, OpenRow]]


def no_open_requests(epoch_offset_ns: int, engine_id: str | None) -> dict[str, OpenRow]:
    return {}


class _Kept(NamedTuple):
    # The record without its event times, token gaps and turn, which may be large, and without prompts, which are
    # private.
    record: RequestRecord
    gaps: TokenGaps | None
    mean_event_tokens: float | None
    run_id: str | None
    epoch_offset_ns: int


class RecentRequests:
    """The last `size` records as entries ready for JSON, and the open requests. The telemetry thread writes the
    records, and any thread may read them."""

    def __init__(
        self,
        size: int,
        epoch_offset_ns: EpochOffset,
        open_requests: OpenRequests = no_open_requests,
        targets: Targets | None = None,
    ) -> None:
        self._open_requests = open_requests
        self._targets = targets or Targets()
        self._epoch_offset_ns = epoch_offset_ns
        self._ring: deque[_Kept] = deque(maxlen=size)
        self._lock = Lock()

    def add(self, record: RequestRecord) -> None:
        account = replace(record.account, inter_token_ns=array("q"), prompts=[], span_texts=None)
        gaps = token_gaps(record.event_gaps_ns), mean_event_tokens(record)
        run_id = None if record.turn is None else record.turn.run
        short = replace(record, account=account, event_tokens=array("q"), event_gaps_ns=array("q"), turn=None)
        item = _Kept(short, *gaps, run_id, self._epoch_offset_ns())
        with self._lock:
            self._ring.append(item)

    def get(self, request_id: str) -> Entry | None:
        """Return the newest request with this id, with the explanation of its time, its events, and its neighbours.

        The id may also be its trace id, which exemplars contain.
        """
        ring = self._newest_first()
        for item in ring:
            if request_id in (item.record.request_id, item.record.trace.trace_id_hex):
                records = [other.record for other in ring]
                explanation = list(sentences(item.record, records))
                entry = self._entry(item) | {"explanation": explanation}
                entry["explanation_requests"] = _named(" ".join(explanation), item.record, records)
                return entry | _events(item.record) | _neighbours(item.record, records)
        return None

    def list(
        self,
        *,
        slowest: str | None = None,
        outcome: str | None = None,
        failed: bool = False,
        slow_ms: int = 0,
        client: str | None = None,
        model: str | None = None,
        route: str | None = None,
        id_prefix: str = "",
        limit: int | None = None,
        rows: bool = False,
    ) -> Entries:
        """Return the matching requests, newest first, either as whole entries or as `rows` for a list.

        With `failed`, return only those that failed or were rejected; with `slow_ms`, those that took at least as long;
        with an empty `client`, those without a key. With `slowest`, return those that reached this phase, those that
        spent the longest time in it first.
        """

        def matches(record: RequestRecord) -> bool:
            return (
                (outcome is None or record.outcome == outcome)
                and (not failed or record.outcome in NOT_SERVED)
                and record.times.duration_ns >= slow_ms * 1_000_000
                and (client is None or (record.client or "") == client)
                and (model is None or record.model == model)
                and (route is None or record.http_route == route)
                and (record.request_id.startswith(id_prefix) or record.trace.trace_id_hex.startswith(id_prefix))
            )

        items = [item for item in self._newest_first() if matches(item.record)]
        if slowest is not None:
            phases = ((phase, item) for item in items for phase in item.record.times.phases())
            reached = [(phase.duration_ns, item) for phase, item in phases if phase.name == slowest]
            items = [item for _, item in sorted(reached, key=itemgetter(0), reverse=True)]
        return [self._row(item) if rows else self._entry(item) for item in items[:limit]]

    def open(self, engine_id: str | None = None) -> dict[str, OpenRow]:
        """Return the newest open requests, newest first, keyed by the engine's id, or only the one with this id."""
        return self._open_requests(self._epoch_offset_ns(), engine_id)

    def _newest_first(self) -> tuple[_Kept, ...]:
        with self._lock:
            return tuple(reversed(self._ring))

    def _row(self, item: _Kept) -> Entry:
        record = item.record
        causes_ns = record.causes_ns
        return {
            **dict(zip(_IN_ROWS, _row_facts(record), strict=True)),
            "received_unix_ns": _received_ns(record) + item.epoch_offset_ns,
            "duration_ns": record.times.duration_ns,
            "phases": [
                phase_row(phase.name, phase.duration_ns, causes_ns.get(phase.name, {}))
                for phase in record.times.phases()
            ],
        }

    def _entry(self, item: _Kept) -> Entry:
        record = item.record
        steps = steps_of(item.record)
        received_ns = _received_ns(record)
        duration_ns = record.times.duration_ns
        causes_ns = record.causes_ns
        return {
            **json_of(record),
            "run_id": item.run_id,
            "trace_id": record.trace.trace_id_hex,
            "received_unix_ns": received_ns + item.epoch_offset_ns,
            "duration_ns": duration_ns,
            "duration_ms": duration_ns / 1e6,
            "time_to_first_token_ns": (
                None if record.operation in POOLING_OPERATIONS else record.times.time_to_first_token_ns
            ),
            "phases": [
                {
                    **phase,
                    "duration_ms": phase["duration_ns"] / 1e6,
                    "share": phase["duration_ns"] / max(1, duration_ns),
                    "causes_ns": {cause.value: ns for cause, ns in causes_ns.get(phase["name"], {}).items()},
                    "others": [_others(one) for one in record.account.others_ns.get(phase["name"], [])],
                }
                for phase in _phases(record, received_ns)
            ],
            "slo": {
                judged.slo: {"target_ns": judged.target_ns, "is_met": judged.is_met}
                for judged in self._targets.judge(record)
            },
            "queue_waits_ns": {reason.value: wait_ns for reason, wait_ns in record.account.waits_ns.items()},
            "machine_users_ns": record.account.machine_users_ns,
            "token_gaps": item.gaps._asdict() if item.gaps is not None else None,
            "mean_event_tokens": item.mean_event_tokens,
            "steps": steps._asdict() | {"last": record.account.steps[-1]} if steps is not None else None,
        }


def _received_ns(record: RequestRecord) -> int:
    return record.times.phases()[0].start_ns


def _phases(record: RequestRecord, since_ns: int) -> Entries:
    return [
        {"name": phase.name, "start_ns": phase.start_ns - since_ns, "duration_ns": phase.duration_ns}
        for phase in record.times.phases()
    ]


def _others(others: OthersTime) -> Entry:
    return {**others._asdict(), "whose": others.whose.value}


def _named(text: str, own: RequestRecord, records: Iterable[RequestRecord]) -> list[str]:
    """Return the ids of other requests, ended or open, that a text mentions."""
    ids = {record.request_id for record in records} | {str(own.reuse.get("evicted_for", ""))}
    return sorted((ids - {own.request_id}).intersection(_WORD.findall(text)))


def _events(record: RequestRecord) -> Entry:
    received_ns = _received_ns(record)
    events = [
        {
            "name": event.kind.value,
            "at_ns": event.at_ns - received_ns,  # since the request was received
            "at_ms": (event.at_ns - received_ns) / 1e6,
            "choice": event.choice,
            "details": dict(event.details),
        }
        for event in record.account.events
    ]
    return {"events": events, "num_events_dropped": record.account.num_events_dropped}


def _neighbours(own: RequestRecord, ring: Iterable[RequestRecord]) -> Entry:
    """Return the requests in the ring that shared steps with `own`, those with the most common steps first."""
    shared = [(num_shared(own.account.steps, other.account.steps), other) for other in ring if other is not own]
    neighbours = sorted((pair for pair in shared if pair[0]), key=itemgetter(0), reverse=True)
    named = [
        {
            "request_id": record.request_id,
            "operation": record.operation,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "num_shared_steps": num_steps,
            "phases": _phases(record, _received_ns(own)),  # relative to when `own` was received
        }
        for num_steps, record in neighbours[:MOST_NEIGHBOURS]
    ]
    return {"num_neighbours": len(neighbours), "neighbours": named}
