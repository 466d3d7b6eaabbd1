"""Reports of replicas for routers."""

from array import array
from math import inf

import msgspec
import pytest

from oaiserve.wire.report import MOST_MODELS, MOST_NAME_CHARACTERS, MOST_SECONDS, ReplicaReport, Report


@pytest.mark.parametrize("seconds", [0.5, 2 * MOST_SECONDS, inf])
def test_routers_can_read_every_estimate(seconds: float) -> None:
    report = ReplicaReport("r", "1", 1, 0, 0, array("Q"), step_seconds=seconds)
    sent = msgspec.json.encode(Report.of(report, is_ready=True, is_hung=False, models=("m",)))
    read = msgspec.json.decode(sent, type=Report)
    assert (read.step_seconds, read.models) == (min(seconds, MOST_SECONDS), ("m",))


def test_names_that_are_too_long_or_too_many_are_left_out() -> None:
    report = ReplicaReport("r", "1", 1, 0, 0, array("Q"))
    path = "a" * MOST_NAME_CHARACTERS
    many = tuple(map(str, range(MOST_MODELS + 1)))
    states = {"is_ready": True, "is_hung": False}
    assert Report.of(report, **states, models=("m",), aliases=(path, f"{path}b")).of_replica("r").aliases == (path,)
    assert Report.of(report, **states, models=many, aliases=(path,)).of_replica("r").aliases == ()
