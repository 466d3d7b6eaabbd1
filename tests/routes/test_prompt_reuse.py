"""Each request says what its prompt reused, and why the rest was read again."""

from collections.abc import Iterator
from typing import Any

import pytest

from oaiserve.facts.record import ReadAgain, RequestRecord
from oaiserve.routes.prompt_reuse import MAX_RUN_CHARACTERS, run_of
from tests.serving import Served, reading

SYSTEM = "You are a helpful assistant who answers in one sentence. The time is 12:00."
CLOCK = SYSTEM.replace("12:00", "12:01")
QUESTION = "What is the capital of France, and how many people live there?"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with reading() as served:
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


def test_another_salt_reads_the_prompt_again(server: Served) -> None:
    chat(server, "Salted.", QUESTION, cache_salt="one")
    record = chat(server, "Salted.", QUESTION, cache_salt="two")
    assert record.read_again_reason is ReadAgain.SALT


def test_an_eviction_names_the_request_that_took_the_blocks() -> None:
    with reading(kv_blocks=64) as served:
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
        ({"x-session-id": "a", "session-id": "b"}, "a"),
        ({"session_id": "codex"}, "codex"),
        ({"x-claude-code-session-id": "claude"}, "claude"),
        ({"x-session-id": "a" * 999}, "a" * MAX_RUN_CHARACTERS),
        ({}, ""),
    ],
)
def test_a_header_names_the_run(headers: dict[str, str], run: str) -> None:
    assert run_of(headers) == run
