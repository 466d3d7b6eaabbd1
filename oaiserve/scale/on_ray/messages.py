"""Messages through Ray: reports of replicas to routers, as bytes, and the questions of the front where requests go."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from oaiserve.facts.prefix_keys import Prompt
from oaiserve.facts.report import ReplicaReport
from oaiserve.facts.routing_decision import Decision

REPORT = "report"  # its key in the routing stats of a replica


@dataclass(slots=True)
class RoutingRequest:
    """A request to be routed, and later the decision."""

    prompt: Prompt
    session: str | None = None
    decision: Decision | None = None


def encode_report(report: ReplicaReport) -> bytes:
    """Encode a report for routers, without the replica's name, which they know."""
    fields = (report.incarnation, report.number, report.num_open, report.waiting_tokens, report.keys.tobytes())
    return msgspec.msgpack.encode(fields)


def decode_report(data: bytes, replica: str) -> ReplicaReport:
    """Return the report of the replica with this name."""
    incarnation, number, num_open, waiting_tokens, keys = msgspec.msgpack.decode(
        data, type=tuple[str, int, float, float, bytes]
    )
    return ReplicaReport(replica, incarnation, number, num_open, waiting_tokens, array("Q", keys))
