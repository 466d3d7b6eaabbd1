"""The ring of the last requests."""

from __future__ import annotations

import json

from oaiserve.telemetry.recent import RecentRequests
from oaiserve.times import Outcome


def test_list_is_newest_first_and_holds_the_last_n(make_record) -> None:
    recent = RecentRequests(2, 0)
    for request_id in ("a", "b", "c"):
        recent.add(make_record(request_id=request_id))
    assert [entry["request_id"] for entry in recent.list()] == ["c", "b"]


def test_get_finds_by_request_id(make_record) -> None:
    recent = RecentRequests(4, 0)
    recent.add(make_record(request_id="a", prompt_tokens=17))
    entry = recent.get("a")
    assert entry is not None
    assert entry["prompt_tokens"] == 17
    assert recent.get("b") is None


def test_phases_carry_the_records_integers(make_record) -> None:
    record = make_record()
    recent = RecentRequests(1, 0)
    recent.add(record)
    entry = recent.list()[0]
    phases = record.times.phases()
    assert [phase["duration_ns"] for phase in entry["phases"]] == [phase.duration_ns for phase in phases]
    assert sum(phase["duration_ns"] for phase in entry["phases"]) == entry["duration_ns"]
    assert entry["phases"][3]["duration_ms"] == phases[3].duration_ns / 1e6


def test_times_are_told_by_the_wall_clock(make_record) -> None:
    record = make_record()
    recent = RecentRequests(1, epoch_offset_ns=5_000)
    recent.add(record)
    assert recent.list()[0]["received_unix_ns"] == record.times.received + 5_000


def test_every_outcome_is_ready_for_json(make_record) -> None:
    recent = RecentRequests(10, 0)
    for num_stamps, outcome in enumerate(Outcome, start=1):
        recent.add(make_record(num_stamps, outcome=outcome, http_status=None))
    assert {entry["outcome"] for entry in json.loads(json.dumps(recent.list()))} == set(Outcome)


def test_a_ring_of_size_zero_keeps_nothing(make_record) -> None:
    recent = RecentRequests(0, 0)
    recent.add(make_record())
    assert recent.list() == []
