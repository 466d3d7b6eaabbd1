"""What replicas send to routers arrives as it was sent."""

from __future__ import annotations

from array import array

from oaiserve.facts.report import ReplicaReport
from oaiserve.scale.on_ray.messages import decode_report, encode_report

NAME = "SERVE_REPLICA::oaiserve#replica#k3f9x2"


def test_a_report_arrives_as_it_was_sent() -> None:
    report = ReplicaReport(NAME, "abc", 7, 2.5, 120.0, array("Q", [1, 2**64 - 1]))
    assert decode_report(encode_report(report), NAME) == report
