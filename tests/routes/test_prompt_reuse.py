"""Each request says what its prompt reused, and why the rest was read again."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from oaiserve.facts.record import ReadAgain, RequestRecord
from oaiserve.facts.turn import AgentRun
from oaiserve.routes.prompt_reuse import MAX_RUN_CHARACTERS, run_of
from tests.serving import Served
from tests.world.serving import Place, reading

SYSTEM = "You are a helpful assistant who answers in one sentence. The time is 12:00."
CLOCK = SYSTEM.replace("12:00", "12:01")
QUESTION = "What is the capital of France, and how many people live there?"


@pytest.fixture
def server(place: Place) -> Iterator[Served]:
    with reading(place) as served:
        yield served


def chat(served: Served, *contents: str, headers: dict[str, str] | None = None, **body: Any) -> RequestRecord:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    body = {"messages": messages, "max_tokens": 1, **body}
    assert served.http.post("/v1/chat/completions", json=body, headers=headers or {}).status_code == 200
    return served.telemetry.next_record()


def test_a_clock_in_the_system_message_is_named(server: Served) -> None:
    before = chat(server, SYSTEM, QUESTION)
    record = chat(server, CLOCK, QUESTION)
    assert record.read_again_reason is ReadAgain.SYSTEM
    assert record.reuse["compared_with"] == before.request_id
    assert SYSTEM.index("0.") < record.reuse["common_tokens"] < len("<|im_start|>system\n") + SYSTEM.index("0.")
    assert record.cached_tokens + record.read_again_tokens == record.prompt_tokens


def test_a_conversation_that_goes_on_reads_nothing_again(server: Served) -> None:
    chat(server, "Go on.", QUESTION)
    record = chat(server, "Go on.", QUESTION, "Paris.", "And of Spain?")
    assert (record.read_again_reason, record.read_again_tokens) == (None, 0)
    assert record.cached_tokens > 0


def test_a_changed_question_is_the_message_with_its_place(server: Served) -> None:
    chat(server, "Stay.", QUESTION, "Paris.", "And of Spain?")
    record = chat(server, "Stay.", QUESTION.replace("France", "Norway"), "Paris.", "And of Spain?")
    assert (record.read_again_reason, record.reuse["place"]) == (ReadAgain.MESSAGE, 1)


def test_requests_of_one_run_are_compared_with_each_other(server: Served) -> None:
    mine = chat(server, "Mine.", QUESTION, headers={"x-session-id": "run"})
    chat(server, "Mine, by another.", QUESTION)
    record = chat(server, "Mine, changed.", QUESTION, headers={"x-session-id": "run"})
    assert record.reuse["compared_with"] == mine.request_id


def test_a_header_says_how_much_was_read_again_and_why(server: Served) -> None:
    chat(server, "With a header, at 12:00.", QUESTION)
    messages = [{"role": "system", "content": "With a header, at 12:01."}, {"role": "user", "content": QUESTION}]
    body = {"messages": messages, "max_tokens": 1}
    answer = server.http.post("/v1/chat/completions", json=body)
    record = server.telemetry.next_record()
    assert answer.headers["x-oaiserve-read-again"] == f"{record.read_again_tokens}; reason=system"
    again = server.http.post("/v1/chat/completions", json=body)
    server.telemetry.next_record()
    assert "x-oaiserve-read-again" not in again.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_usage_has_what_was_read_again_if_it_is_asked_for(server: Served, path: str, stream: bool) -> None:
    asked = {"x-include-reuse": "true"}

    def details(headers: dict[str, str], salt: str) -> dict[str, Any]:
        text = f"Usage of {path}, {stream}, which is long enough for some blocks."
        prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
        more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = server.http.post(path, json=prompt | {"max_tokens": 1, "cache_salt": salt} | more, headers=headers)
        record = server.telemetry.next_record()
        texts = [line[6:] for line in answer.text.splitlines() if '"usage":{' in line] if stream else [answer.text]
        found: dict[str, Any] = json.loads(texts[-1])["usage"]["prompt_tokens_details"]
        if headers:
            again = found["read_again_tokens"], found["read_again_reason"]
            assert again == (record.read_again_tokens, record.read_again_reason)
        return found

    assert details(asked, "one")["read_again_tokens"] == 0
    assert details(asked, "two")["read_again_reason"] == "salt"
    assert details({}, "three").keys() == {"cached_tokens"}


def test_another_salt_reads_the_prompt_again(server: Served) -> None:
    chat(server, "Salted.", QUESTION, cache_salt="one")
    record = chat(server, "Salted.", QUESTION, cache_salt="two")
    assert record.read_again_reason is ReadAgain.SALT


def test_an_eviction_names_the_request_that_took_the_blocks(place: Place) -> None:
    with reading(place, kv_blocks=64) as served:
        chat(served, SYSTEM, QUESTION)
        taker = chat(served, "x" * 200)
        record = chat(served, SYSTEM, QUESTION)
    assert record.read_again_reason is ReadAgain.EVICTED
    assert record.reuse["evicted_for"] == taker.response_id


def test_a_text_is_found_by_its_beginning(server: Served) -> None:
    text = "Once upon a time there was a prompt of many letters. "
    for end in ("The end.", "To be continued."):
        server.http.post("/v1/completions", json={"prompt": text + end, "max_tokens": 1})
    server.telemetry.next_record()
    assert (
        server.telemetry.next_record().reuse["common_tokens"] >= len(text) - 1
    )  # the last blank may be one token with what follows


@pytest.mark.parametrize(
    ("headers", "run"),
    [
        ({"x-session-id": "a", "session-id": "b"}, AgentRun("a")),
        ({"session_id": "codex"}, AgentRun("codex")),
        ({"session-id": "codex", "thread-id": "codex"}, AgentRun("codex")),
        ({"session-id": "codex", "thread-id": "sub", "x-codex-parent-thread-id": "codex"}, AgentRun("codex", "sub")),
        ({"session-id": "sub", "thread-id": "sub", "x-codex-parent-thread-id": "codex"}, AgentRun("codex", "sub")),
        ({"x-claude-code-session-id": "claude"}, AgentRun("claude")),
        ({"x-claude-code-session-id": "claude", "x-claude-code-agent-id": "sub"}, AgentRun("claude", "sub")),
        ({"x-session-id": "sub", "x-parent-session-id": "opencode"}, AgentRun("opencode", "sub")),
        ({"x-session-id": "a" * 999}, AgentRun("a" * MAX_RUN_CHARACTERS)),
        ({"thread-id": "only"}, AgentRun()),
        ({}, AgentRun()),
    ],
)
def test_headers_name_the_run_and_its_agent(headers: dict[str, str], run: AgentRun) -> None:
    assert run_of(headers) == run


def test_a_record_has_the_turn_of_a_named_run(server: Served) -> None:
    first = chat(server, "Named.", QUESTION, headers={"x-claude-code-session-id": "s"}).turn
    helper = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "helper"}
    second = chat(server, "Named.", "Look for it.", headers=helper).turn
    assert first is not None
    assert second is not None
    assert (first.run, first.is_named, first.agent) == (second.run, True, "")
    assert second.agent.startswith("agent_")
    assert first.written_tokens > 0


def test_the_metadata_of_a_body_names_a_run(server: Served) -> None:
    turns = [chat(server, text, QUESTION, metadata={"session_id": "meta"}).turn for text in ("First.", "Second.")]
    assert turns[0] is not None
    assert turns[1] is not None
    assert (turns[0].run, turns[0].is_named) == (turns[1].run, True)


def test_a_prompt_that_goes_on_is_of_the_run_before(server: Served) -> None:
    first = chat(server, "Unnamed.", QUESTION).turn
    second = chat(server, "Unnamed.", QUESTION, "Paris.", "And of Spain?").turn
    other = chat(server, "Unnamed.", "And of Spain?").turn
    assert first is not None
    assert second is not None
    assert other is not None
    assert (second.run, second.is_named, second.prompt().before) == (first.run, False, (first.prompt().digest,))
    assert other.run != first.run
