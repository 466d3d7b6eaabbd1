"""/debug/runs over HTTP, with a small real model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.config import ServerOptions
from oaiserve.facts.times import duration
from tests.plugins.runs.asked import CALL, LONG, QUESTION, RESULT, app_of, chat
from tests.world.serving import Place

pytestmark = pytest.mark.usefixtures("place")


@contextmanager
def served(place: Place, model: Path, server: ServerOptions) -> Iterator[httpx.Client]:
    with place.running(app_of(model, server, place.world)) as url, place.plain(url) as client:
        yield client


@pytest.fixture(scope="module")
def client(place_session: Place, small_model: Path) -> Iterator[httpx.Client]:
    with served(place_session, small_model, ServerOptions(served_model_name=("small",))) as client:
        yield client


def run_with(client: httpx.Client, request_id: str) -> dict[str, Any]:
    """Return the run with this request."""
    rows = client.get("/debug/runs").json()["runs"]
    runs = [client.get(f"/debug/runs/{row['run_id']}").json() for row in rows]
    (run,) = [run for run in runs if any(turn["turn"]["request_id"] == request_id for turn in run["turns"])]
    return dict(run)


def test_a_run_has_its_turns_in_order(client: httpx.Client) -> None:
    chat(client, "turn-1", QUESTION)
    chat(client, "turn-2", QUESTION, CALL, RESULT)
    run = run_with(client, "turn-2")
    assert [turn["turn"]["request_id"] for turn in run["turns"]] == ["turn-1", "turn-2"]
    assert (run["is_named"], run["is_live"], run["num_turns"]) == (False, False, 2)
    assert run["turns"][1]["gap"]["kind"] == "tools"
    assert run["turns"][1]["turn"]["sizes"]["tool_results"] > 0
    entry = client.get("/debug/requests/turn-2").json()
    turn = run["turns"][1]["turn"]
    for name in ("prompt_tokens", "cached_tokens", "read_again_tokens", "completion_tokens", "duration_ns", "trace_id"):
        assert turn[name] == entry[name], name


def test_run_names_its_program_and_says_how_long_it_is_silent(client: httpx.Client) -> None:
    chat(client, "named", QUESTION, session_id="named", user_agent="claude-cli/2.1.332 (external, sdk-cli)")
    run = run_with(client, "named")
    assert run["program"] == "Claude Code"
    rows = {row["run_id"]: row for row in client.get("/debug/runs").json()["runs"]}
    row = rows[run["run_id"]]
    assert (row["program"], row["num_open"]) == ("Claude Code", 0)
    assert 0 < run["silent_ns"] < row["silent_ns"]


def test_turn_has_the_sentence_on_what_was_read_again_that_its_request_has(client: httpx.Client) -> None:
    for number in range(2):
        chat(client, f"again-{number}", {"role": "system", "content": f"{number} o'clock"}, LONG, session_id="again")
    first, second = (turn["turn"] for turn in run_with(client, "again-1")["turns"])
    assert "read_again_explanation" not in first or first["read_again_explanation"] is None
    assert "were read again, which took" in second["read_again_explanation"]
    assert "the system message differs" in second["read_again_explanation"]
    assert f"which took {duration(second['read_again_ns'])}:" in second["read_again_explanation"]
    assert second["read_again_explanation"] in client.get("/debug/requests/again-1").json()["explanation"]


def test_subagents_are_of_the_run_that_started_them(client: httpx.Client) -> None:
    chat(client, "main", QUESTION, x_session_id="parent")
    chat(client, "sub", {"role": "user", "content": "Look for files."}, x_session_id="c", x_parent_session_id="parent")
    chat(client, "leaf", {"role": "user", "content": "Look in a.txt."}, x_session_id="l", x_parent_session_id="c")
    run = run_with(client, "leaf")
    assert [turn["turn"]["request_id"] for turn in run["turns"]] == ["main", "sub", "leaf"]
    assert [turn["turn"]["agent"] == "" for turn in run["turns"]] == [True, False, False]
    assert (run["is_named"], run["num_agents"]) == (True, 3)


def test_a_run_can_be_opened_in_perfetto(client: httpx.Client) -> None:
    chat(client, "traced", QUESTION, session_id="traced")
    run = run_with(client, "traced")
    response = client.get(f"/debug/runs/{run['run_id']}?form=perfetto")
    assert response.headers["content-disposition"] == f'attachment; filename="{run["run_id"]}.json"'
    assert "turn" in {event["name"] for event in response.json()["traceEvents"]}


def test_digests_of_prompts_are_only_for_gateways(client: httpx.Client) -> None:
    chat(client, "digested", QUESTION, session_id="digested")
    run = run_with(client, "digested")
    rows = client.get("/debug/runs").json()["runs"]
    assert not any("digests" in row or "before" in row for row in rows)
    seen = client.get("/debug/runs?form=gateway").json()["runs"]
    assert next(row for row in seen if row["run_id"] == run["run_id"])["digests"]
    assert "digest" not in run["turns"][0]["turn"]


def test_no_text_and_no_id_of_a_client_is_stored(client: httpx.Client) -> None:
    chat(client, "private", {"role": "user", "content": "zanzibar"}, session_id="secret-session")
    text = client.get(f"/debug/runs/{run_with(client, 'private')['run_id']}").text
    assert "zanzibar" not in text
    assert "secret-session" not in text


def test_an_unknown_run_is_not_found(client: httpx.Client) -> None:
    response = client.get("/debug/runs/run_unknown")
    assert (response.status_code, response.json()["error"]["message"][:40]) == (
        404,
        "There is no run 'run_unknown' here. This",
    )


def test_the_end_of_runs_is_on_the_page_of_metrics(client: httpx.Client) -> None:
    assert "# TYPE oaiserve_run_turns histogram" in client.get("/metrics").text


def test_runs_are_closed_where_requests_are(place: Place, small_model: Path) -> None:
    with served(
        place, small_model, ServerOptions(served_model_name=("small",), host="0.0.0.0", open_dashboard=False)
    ) as open_:
        assert open_.get("/debug/runs").status_code == open_.get("/debug/requests").status_code == 404
