"""`prompt_cache_diagnostics` says which part of a prompt differs from that of an earlier response."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.routes.asking import PARAMETERS
from tests.serving import Served
from tests.world.serving import Place, reading

INPUT = [
    {"role": "user", "content": "What is the capital of France, and how many people live there?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Spain?"},
]
TOOL = {"type": "function", "name": "search", "description": "Search.", "parameters": PARAMETERS}


@pytest.fixture
def server(place: Place) -> Iterator[Served]:
    with reading(place) as served:
        yield served


def ask(served: Served, before: str | None = None, **body: Any) -> dict[str, Any]:
    options = {} if before is None else {"prompt_cache_options": {"comparison_response_id": before}}
    answer = served.http.post("/v1/responses", json={"input": INPUT, "max_output_tokens": 1} | options | body)
    assert answer.status_code == 200, answer.text
    served.telemetry.next_record()
    return answer.json()


CHANGES = {
    "tools_changed": {"tools": [TOOL]},
    "input_changed": {"input": [{"role": "user", "content": "What is the capital of Norway?"}, *INPUT[1:]]},
    "prompt_cache_key_changed": {"cache_salt": "other"},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_the_first_changed_part_is_named(server: Served, reason: str) -> None:
    before = ask(server)
    answer = ask(server, before["id"], **CHANGES[reason])
    diagnostics = answer["prompt_cache_diagnostics"]
    assert (diagnostics["type"], diagnostics["reason"]) == ("cache_miss", reason)
    assert 0 < diagnostics["cache_missed_tokens"] <= answer["usage"]["input_tokens"]
    assert 0 < diagnostics["comparison_reusable_tokens"] <= before["usage"]["input_tokens"]


def test_a_conversation_that_goes_on_is_a_hit(server: Served) -> None:
    before = ask(server, input=INPUT[:1])
    assert ask(server, before["id"])["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def test_an_unknown_response_is_said(server: Served) -> None:
    assert ask(server, "resp_unknown")["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_a_client_that_compares_with_nothing_gets_nothing(server: Served) -> None:
    assert "prompt_cache_diagnostics" not in ask(server)


def test_an_evicted_prompt_is_unavailable(place: Place) -> None:
    with reading(place, kv_blocks=80) as served:
        before = ask(served)
        ask(served, instructions="x" * 220, input=INPUT[2:])
        answer = ask(served, before["id"])
    assert answer["prompt_cache_diagnostics"] == {"type": "unavailable"}


def test_written_tokens_are_counted(server: Served) -> None:
    first, again = (ask(server, instructions="Written, and never seen before.")["usage"] for _ in range(2))
    written = [usage["input_tokens_details"]["cache_write_tokens"] for usage in (first, again)]
    assert written[0] > written[1] == 0


def test_a_summary_in_place_of_earlier_items_is_named(server: Served) -> None:
    before = ask(server)
    summary = ask(server, input=[*INPUT, {"type": "compaction_trigger"}], max_output_tokens=40)["output"][-1]
    answer = ask(server, before["id"], input=[summary, {"role": "user", "content": "And of Italy?"}])
    assert answer["prompt_cache_diagnostics"]["reason"] == "context_compacted"
