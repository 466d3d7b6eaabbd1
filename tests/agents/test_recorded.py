"""Plays recorded sessions of agents, without the agents: each request is answered, and hits the prefix cache."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest

from oaiserve.facts.record import ToolCallOutcome
from tests.agents import recorded
from tests.agents.scripted import BLOCK, ScriptedServer, next_turn, scripted_server
from tests.missing_plugins import is_served
from tests.published import checked
from tools.clients.sessions import AGENTS, RECORDED

SERVED = [name for name in RECORDED if is_served(next(recorded.requests(name))[0])]  # by the plug-ins that are there
TURNS = {name: AGENTS[name].turns for name in RECORDED}


@pytest.fixture(scope="module", params=SERVED)
def played(request: pytest.FixtureRequest) -> Iterator[tuple[str, ScriptedServer, list[httpx.Response]]]:
    """Give a recording's name, the server that it was played to, and the answers."""
    name = request.param
    with (
        scripted_server(lambda prompt: next_turn(prompt, TURNS[name], AGENTS[name].marker)) as server,
        checked(httpx.Client(base_url=server.url, timeout=60)) as http,
    ):
        yield name, server, [http.post(path, json=body) for path, body in recorded.requests(name)]


def test_each_turn_is_answered_with_its_call(played: tuple[str, ScriptedServer, list[httpx.Response]]) -> None:
    name, server, answers = played
    assert [answer.status_code for answer in answers] == [200] * 10
    for number, (turn, answer) in enumerate(zip(TURNS[name], answers, strict=True), start=1):
        assert f"Turn {number}: {turn.says}" in said(answer)
        assert [called for called, _ in calls(answer)] == ([turn.tool] if turn.tool else [])
        assert [arguments for _, arguments in calls(answer)] == ([turn.arguments] if turn.tool else [])
    records = server.records(len(answers))
    assert [record.error_type for record in records] == [None] * 10
    left_out = [record.tool_calls.get(ToolCallOutcome.LEFT_OUT, 0) for record in records]
    assert left_out == [1 if name == "codex" else 0] * 10  # its web_search
    for before, record in pairwise(records):
        assert record.cached_tokens > before.prompt_tokens - BLOCK


@pytest.mark.plugin("messages")
def test_a_system_block_that_changes_at_each_request_spoils_no_hit() -> None:
    turns = TURNS["claude-code"]
    marker = AGENTS["claude-code"].marker
    with scripted_server(lambda prompt: next_turn(prompt, turns, marker)) as server:
        for number, (path, body) in enumerate([*recorded.requests("claude-code")][:3]):
            first, *rest = body["system"]
            body["system"] = [first | {"text": f"{first['text']} cch={number}abcd;"}, *rest]
            assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200
        first, *later = server.records(3)
    # Neither the tools nor the system's other blocks are read again.
    assert first.cached_tokens == 0
    assert all(record.cached_tokens > 0.9 * record.prompt_tokens for record in later)


def test_the_tokens_of_a_recorded_request_are_counted_as_they_are_computed() -> None:
    path, body = next(recorded.requests("claude-code"))
    fields = {key: value for key, value in body.items() if key not in ("stream", "max_tokens", "metadata")}
    with scripted_server(lambda _: "Yes.") as server:
        counted = httpx.post(f"{server.url}{path}/count_tokens", json=fields, timeout=60).json()
        assert httpx.post(server.url + path, json=body, timeout=60).status_code == 200
        (record,) = server.records(1)
    assert counted == {"input_tokens": record.prompt_tokens}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: {")]


def said(answer: httpx.Response) -> str:
    deltas = [event["delta"] for event in events(answer) if event["type"].endswith(("text.delta", "block_delta"))]
    return "".join(delta if isinstance(delta, str) else delta.get("text", "") for delta in deltas)


def calls(answer: httpx.Response) -> list[tuple[str, Any]]:
    """Return the calls of an answer, with their arguments, as its client puts them together."""
    open_calls: dict[Any, list[str]] = {}
    for event in events(answer):
        match event:
            case {"type": "response.output_item.done", "item": {"type": "function_call"} as item}:
                open_calls[event["output_index"]] = [item["name"], item["arguments"]]
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                open_calls[event["index"]] = [name, ""]
            case {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": text}}:
                open_calls[event["index"]][1] += text
    return [(name, json.loads(arguments)) for name, arguments in open_calls.values()]
