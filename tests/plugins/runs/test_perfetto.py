"""A run as a trace for Perfetto."""

from itertools import pairwise
from typing import Any

from oaiserve.plugins.runs.kept_runs import KeptRuns
from oaiserve.plugins.runs.perfetto import trace_of
from oaiserve.plugins.runs.turns import run_of
from oaiserve.runtime import THREADS
from tests.plugins.runs.records import turn_at


def events_of(*records: Any) -> list[dict[str, Any]]:
    kept = KeptRuns(THREADS.unix_ns, lambda: 0)
    for record in records:
        kept.add(record)
    found = kept.get("run_1")
    assert found is not None
    events: list[dict[str, Any]] = trace_of(run_of(*found[:2], 0))["traceEvents"]
    return events


def slices_of(events: list[dict[str, Any]]) -> list[tuple[int, str, float, float]]:
    return [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]


def test_turns_have_their_phases_within_them_and_their_gaps_before_them() -> None:
    slices = slices_of(events_of(turn_at(0, 100), turn_at(300, 400, turn={"after_tools": True})))
    turns = [(start, start + took) for _, name, start, took in slices if name == "turn"]
    assert turns == [(0, 100_000), (300_000, 400_000)]
    assert (1, "tools", 100_000, 200_000) in slices
    assert [name for _, name, start, took in slices if name == "decode" and took == 100_000] == ["decode"] * 2


def test_slices_of_a_thread_never_overlap_in_part() -> None:
    both = [turn_at(0, 100), turn_at(50, 150), turn_at(120, 300), turn_at(400, 500, turn={"agent": "agent_1"})]
    slices = [each for each in slices_of(events_of(*both)) if each[1] in ("turn", "tools", "waiting for the user")]
    for thread in {thread for thread, *_ in slices}:
        spans = sorted((start, start + took) for number, _, start, took in slices if number == thread)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_threads_have_the_names_of_agents_and_conversations() -> None:
    events = events_of(turn_at(0, 100), turn_at(200, 300), turn_at(220, 250, turn={"agent": "agent_1"}))
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["conversation 1", "subagent 2"]
