"""The first words of a run in the list of runs, which only the server's owner sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.config import ServerOptions
from tests.plugins.inspector.inspected import served
from tests.world.serving import Place

pytestmark = pytest.mark.plugin("runs")

SYSTEM = {"role": "system", "content": "Be brief."}
OWNER = {"authorization": "Bearer owner"}
GUEST = {"authorization": "Bearer guest"}


def run_of(place: Place, client: httpx.Client, headers: dict[str, str]) -> httpx.Response:
    """Make a run of two turns, of which a subagent has the second, and return the list of runs."""
    for session, text in (("main", "Write a poem."), ("helper", "Look for rhymes.")):
        body = {"model": "small", "max_tokens": 1, "messages": [SYSTEM, {"role": "user", "content": text}]}
        of_session = {"x-session-id": session} | ({"x-parent-session-id": "main"} if session == "helper" else {})
        response = client.post("/v1/chat/completions", json=body, headers=headers | of_session)
        assert response.status_code == 200, response.text

    place.world.settle(1.0)  # Records are written in batches.
    response = client.get("/debug/runs", headers=headers)
    assert [run["num_turns"] for run in response.json()["runs"]] == [2]
    return response


def words_in(response: httpx.Response) -> list[str]:
    return [run["first_words"] for run in response.json()["runs"]]


def test_list_of_runs_has_the_first_words_of_the_conversation_that_began_each(place: Place, small_model: Path) -> None:
    with served(place, small_model, inspect=10) as client:
        response = run_of(place, client, {})
    assert words_in(response) == ["Write a poem."]
    assert response.headers["cache-control"] == "no-store"


def test_list_of_runs_has_no_words_without_inspect(place: Place, small_model: Path) -> None:
    with served(place, small_model, inspect=0) as client:
        response = run_of(place, client, {})
    assert words_in(response) == [""]


@pytest.mark.parametrize(
    ("server", "sent", "words"),
    [
        ({"api_key": ("owner",)}, OWNER, "Write a poem."),
        ({"api_key": ("owner", "guest")}, GUEST, ""),
        ({"host": "0.0.0.0", "open_dashboard": True}, {}, ""),
        ({}, {"x-forwarded-for": "192.0.2.1"}, ""),
    ],
    ids=["owner", "one of two keys", "open to all", "from elsewhere"],
)
def test_only_the_owner_gets_first_words(
    place: Place, small_model: Path, server: dict[str, Any], sent: dict[str, str], words: str
) -> None:
    options = ServerOptions(served_model_name=("small",), **server)
    with served(place, small_model, inspect=10, server=options) as client:
        run_of(place, client, OWNER)
        assert words_in(client.get("/debug/runs", headers=sent)) == [words]
