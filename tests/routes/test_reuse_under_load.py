"""What prompts reused adds up under load: with many clients, choices, prompts in pieces, preemptions and evictions."""

from random import Random
from typing import Any

import pytest

from oaiserve.facts.record import ReadAgain, RequestRecord
from tests.serving import Served
from tests.world.serving import Place, reading

NUM_CLIENTS = 100
NUM_TURNS = 3
BLOCK = 4
WORDS = ("Paris", "Madrid", "Oslo", "Rome")


def records_of(served: Served, number: int) -> dict[str, RequestRecord]:
    """Return the records of the next requests, by their ids."""
    return {record.request_id: record for record in (served.telemetry.next_record() for _ in range(number))}


def test_evictions_are_told_right_under_a_hundred_clients(place: Place) -> None:
    """Each client only goes on with its talk, so all that it reads again of its last prompt was evicted."""
    turns: dict[int, list[str]] = {client: [] for client in range(NUM_CLIENTS)}

    def talk(client: int) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Client {client} asks in its turn {turn}, at some length."})
            body = {"messages": messages, "max_tokens": 2}
            headers = {"x-session-id": f"client {client}"}
            answer = served.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            turns[client].append(answer.headers["x-request-id"])
            messages.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})

    with reading(place, kv_blocks=400, max_running=8) as served:
        with place.threads() as clients:
            list(clients.map(talk, range(NUM_CLIENTS)))
        records = records_of(served, NUM_CLIENTS * NUM_TURNS)
    answers = {record.response_id for record in records.values()}
    num_evicted = 0
    for ids in turns.values():
        first, *later = (records[request_id] for request_id in ids)
        before = first
        assert first.read_again_tokens == 0
        for record in later:
            assert record.reuse["compared_with"] == before.request_id
            num_lost = record.reuse["common_tokens"] - record.cached_tokens
            assert record.read_again_tokens == (num_lost if num_lost > BLOCK else 0)
            if record.read_again_tokens:
                num_evicted += 1
                assert record.read_again_reason is ReadAgain.EVICTED
                assert record.reuse.get("evicted_for", record.response_id) in answers
            before = record
    assert num_evicted > NUM_CLIENTS, "the cache is too small for all talks"


def body_of(random: Random) -> tuple[str, dict[str, Any]]:
    """Return a route and a body that has much in common with others."""
    shared = {"max_tokens": random.randint(1, 8), "n": random.choice((1, 1, 2, 3)), "ignore_eos": True}
    shared |= {"cache_salt": random.choice("ab")} if random.random() < 0.2 else {}
    if random.random() < 0.3:
        texts = [random.choice(WORDS) * random.randint(4, 20) for _ in range(random.randint(1, 3))]
        return "/v1/completions", {"prompt": texts, **shared}
    messages = [{"role": "system", "content": f"It is {random.randint(12, 13)}:00, and you are brief."}]
    for number in range(random.randint(1, 6)):
        content = random.choice(WORDS) * 3
        messages.append({"role": "assistant" if number % 2 else "user", "content": content})
    return "/v1/chat/completions", {"messages": messages, **shared}


@pytest.mark.parametrize("seed", range(4))
def test_cached_read_again_and_new_tokens_add_up_for_any_history(place: Place, seed: int) -> None:
    random = Random(seed)
    bodies = [body_of(random) for _ in range(60)]

    def ask(path: str, body: dict[str, Any]) -> None:
        answer = served.http.post(path, json=body)
        assert answer.status_code == 200, answer.text

    with reading(place, kv_blocks=56, max_step_tokens=16, max_running=4) as served:
        with place.threads() as clients:
            list(clients.map(lambda both: ask(*both), bodies))
        records = records_of(served, len(bodies)).values()
    for record in records:
        num_new = record.prompt_tokens - record.cached_tokens - record.read_again_tokens
        assert min(record.cached_tokens, record.read_again_tokens, num_new) >= 0
        assert (record.read_again_reason is None) == (record.read_again_tokens == 0)
    assert any(record.account.num_preemptions for record in records)
    assert {record.read_again_reason for record in records} >= {None, ReadAgain.EVICTED}
