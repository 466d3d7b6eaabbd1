"""What replicas, routers and the front tell each other: as bytes through Ray, and as a header through HAProxy."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from oaiserve.cluster.prefix import Prompt
from oaiserve.cluster.report import ReplicaReport
from oaiserve.cluster.router import Decision

# HAProxy takes headers with this beginning from requests of clients, so only a router can have set one.
DECISION_HEADER = "x-serve-router-decision"
REPORT = "report"  # its key in the routing stats of a replica
_KINDS = {
    "replica": str,
    "reason": str,
    "expected_hit_tokens": int,
    "num_holders": int,
    "load": float,
    "bound": float,
}


@dataclass(slots=True)
class Asked:
    """A request that is to be routed, and the decision once there is one."""

    prompt: Prompt
    session: str | None = None
    decision: Decision | None = None


def encode_report(report: ReplicaReport) -> bytes:
    """Return what routers need of a report, without the replica's name, which they know."""
    fields = (report.incarnation, report.number, report.num_open, report.waiting_tokens, report.keys.tobytes())
    return msgspec.msgpack.encode(fields)


def decode_report(data: bytes, replica: str) -> ReplicaReport:
    """Return the report of the replica with this name."""
    incarnation, number, num_open, waiting_tokens, keys = msgspec.msgpack.decode(
        data, type=tuple[str, int, float, float, bytes]
    )
    return ReplicaReport(replica, incarnation, number, num_open, waiting_tokens, array("Q", keys))


def decision_header(decision: Decision) -> str:
    """Return the decision as the value of a header, without quotes and braces, which the front could not read."""
    shown = {**decision._asdict(), "load": round(decision.load, 3), "bound": round(decision.bound, 3)}
    return "; ".join(f"{name}={value}" for name, value in shown.items())


def decision_in(headers: Iterable[tuple[bytes, bytes]]) -> Mapping[str, str | int | float]:
    """Return the decision that the headers of a request carry, by the names of its fields; none if it is broken."""
    value = next((value for name, value in headers if name == DECISION_HEADER.encode()), b"")
    parts = (part.partition("=") for part in value.decode("latin-1").split("; ") if part)
    try:
        return {name: _KINDS[name](text) for name, _, text in parts}
    except (KeyError, ValueError):
        return {}
