"""Reports of replicas for routers."""

from array import array
from math import inf

import msgspec
import pytest

from oaiserve.wire.report import MOST_SECONDS, ReplicaReport, Report


@pytest.mark.parametrize("seconds", [0.5, 2 * MOST_SECONDS, inf])
def test_routers_can_read_every_estimate(seconds: float) -> None:
    report = ReplicaReport("r", "1", 1, 0, 0, array("Q"), step_seconds=seconds)
    sent = msgspec.json.encode(Report.of(report, is_ready=True, is_hung=False, models=("m",)))
    read = msgspec.json.decode(sent, type=Report)
    assert (read.step_seconds, read.models) == (min(seconds, MOST_SECONDS), ("m",))
