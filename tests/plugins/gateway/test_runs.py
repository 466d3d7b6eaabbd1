"""Runs of agents whose turns were served by several replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from oaiserve.plugins.gateway.options import RouteOptions
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, Fleet, fleet
from tests.plugins.runs.records import turn_at
from tests.world.serving import Place

UNNAMED = {"is_named": False}


@pytest.fixture
def two(place: Place) -> Iterator[Fleet]:
    with fleet(place, 2) as running:
        yield running


def add(running: Fleet, replica: int, start_ms: int, **turn: Any) -> None:
    """Add a turn of 100 ms to one of the replicas."""
    served = [*running.replicas.values()][replica]
    served.app.state.runs.add(turn_at(start_ms, start_ms + 100, turn=turn))


def runs_of(running: Fleet) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = running.http.get("/debug/runs").json()["runs"]
    return runs


def test_a_named_run_of_two_replicas_is_one_run(two: Fleet) -> None:
    for number in range(4):
        add(two, number % 2, 200 * number, after_tools=True)
    (row,) = runs_of(two)
    assert (row["num_turns"], len(row["replicas"])) == (4, 2)
    assert (row["model_ns"], row["tools_ns"]) == pytest.approx((400_000_000, 300_000_000), abs=2_000_000)
    run = two.http.get(f"/debug/runs/{row['run_id']}").json()
    assert [turn["turn"]["request_id"] for turn in run["turns"]] == ["req-0", "req-200", "req-400", "req-600"]
    replicas = [turn["turn"]["replica"] for turn in run["turns"]]
    assert replicas[0] == replicas[2] != replicas[1] == replicas[3]


def test_a_run_that_no_client_names_is_found_by_the_prompts_that_continue_each_other(two: Fleet) -> None:
    add(two, 0, 0, run="run_a", digest="1", **UNNAMED)
    add(two, 1, 200, run="run_b", digest="2", before=("1",), **UNNAMED)
    add(two, 0, 400, run="run_a", digest="3", before=("1", "2"), **UNNAMED)
    add(two, 1, 600, run="run_other", digest="9", before=("8",), **UNNAMED)
    (row,) = runs_of(two)
    assert (row["run_id"], row["num_turns"]) == ("run_a", 3)
    for run_id in ("run_a", "run_b"):
        assert two.http.get(f"/debug/runs/{run_id}").json()["num_turns"] == 3


def test_runs_of_single_replicas_are_listed_the_newest_first(two: Fleet) -> None:
    add(two, 0, 0, run="run_old")
    add(two, 1, 500, run="run_new")
    assert [(row["run_id"], len(row["replicas"])) for row in runs_of(two)] == [("run_new", 1), ("run_old", 1)]


def test_a_run_of_two_replicas_is_a_trace_too(two: Fleet) -> None:
    add(two, 0, 0)
    add(two, 1, 200)
    events = two.http.get("/debug/runs/run_1?form=perfetto").json()["traceEvents"]
    assert [event["name"] for event in events].count("turn") == 2


def test_an_unknown_run_is_not_found(two: Fleet) -> None:
    assert two.http.get("/debug/runs/nobody").status_code == 404


def test_runs_of_replicas_with_keys_are_shown_to_those_with_a_key(place: Place) -> None:
    server = replace(BEHIND_A_GATEWAY, api_key=("secret",))
    with fleet(place, 2, server=server, route=RouteOptions(replica_key="secret")) as running:
        add(running, 0, 0)
        assert running.http.get("/debug/runs").status_code == 401
        assert running.http.get("/debug/runs/run_1").status_code == 401
        shown = running.http.get("/debug/runs", headers={"authorization": "Bearer secret"}).json()["runs"]
        assert [row["run_id"] for row in shown] == ["run_1"]
