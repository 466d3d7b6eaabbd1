"""What replicas, routers and the front tell each other arrives as it was sent, and nonsense is nothing."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from oaiserve.cluster.on_ray.messages import (
    DECISION_HEADER,
    decision_header,
    decision_in,
    decode_report,
    encode_report,
)
from oaiserve.cluster.report import ReplicaReport
from oaiserve.cluster.router import Decision, Reason

NAME = "SERVE_REPLICA::oaiserve#replica#k3f9x2"


def test_a_report_arrives_as_it_was_sent() -> None:
    report = ReplicaReport(NAME, "abc", 7, 2.5, 120.0, array("Q", [1, 2**64 - 1]))
    assert decode_report(encode_report(report), NAME) == report


def test_a_decision_arrives_in_a_header() -> None:
    decision = Decision(NAME, Reason.PREFIX, 512, 2, 3.25, 6.5)
    header = decision_header(decision)
    assert not set(header) & set('"{}\r\n'), "the front could not read it"
    found = decision_in([(b"host", b"x"), (DECISION_HEADER.encode(), header.encode())])
    assert found == {**decision._asdict(), "reason": "prefix"}


@given(st.binary(max_size=60))
def test_a_broken_header_is_no_decision(value: bytes) -> None:
    known = set(Decision._fields)
    assert decision_in([(DECISION_HEADER.encode(), value)]).keys() <= known
