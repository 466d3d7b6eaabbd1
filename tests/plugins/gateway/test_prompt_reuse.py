"""What a prompt reused is explained behind a gateway, too, and stays true when another replica has the earlier turn."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from oaiserve.facts.record import ReadAgain, RequestRecord
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.wire.report import MOST_KEYS, ReplicaReport
from tests.plugins.gateway.doubles import BEHIND_A_GATEWAY, SIGNATURE, Fleet, fleet
from tests.world.serving import Place

SYSTEM = "You are a helpful assistant who answers in one sentence. " * 20 + "The time is {}."
QUESTION = {"role": "user", "content": "What is the capital of France, and how many people live there? " * 20}
LONG_TURN = ({"role": "assistant", "content": "Madrid."}, {"role": "user", "content": "Tell me more of it. " * 99})
TALK = (QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Spain?"})

MANY = 10**6
NUMBERS = count()


@pytest.fixture
def two(place: Place) -> Iterator[Fleet]:
    with fleet(place, 2, kv_blocks=2048) as running:
        yield running


class Turn:
    """An answer, and the record of the replica that gave it."""

    def __init__(self, running: Fleet, path: str, body: dict[str, Any]) -> None:
        self.http = running.http.post(path, json={"model": "m"} | body)
        assert self.http.status_code == 200, self.http.text
        self.replica = running.replicas[self.http.headers[SIGNATURE]]
        self.record: RequestRecord = self.replica.telemetry.next_record()

    @property
    def id(self) -> str:
        return str(self.http.json()["id"])


def chat(running: Fleet, *messages: dict[str, str], time: str = "12:00", before: str | None = None) -> Turn:
    assert before is None, "chat names no earlier answer"
    messages = ({"role": "system", "content": SYSTEM.format(time)}, *messages)
    return Turn(running, "/v1/chat/completions", {"messages": messages, "max_tokens": 1})


def messages(running: Fleet, *messages: dict[str, str], time: str = "12:00", before: str | None = None) -> Turn:
    body = {"system": SYSTEM.format(time), "messages": messages, "max_tokens": 1}
    return Turn(running, "/v1/messages", body | {"diagnostics": {"previous_message_id": before}})


def responses(running: Fleet, *items: dict[str, str], time: str = "12:00", before: str | None = None) -> Turn:
    body = {"instructions": SYSTEM.format(time), "input": items, "max_output_tokens": 1, "store": False}
    return Turn(running, "/v1/responses", body | {"prompt_cache_options": {"comparison_response_id": before}})


ROUTES = (
    chat,
    pytest.param(messages, marks=pytest.mark.plugin("messages")),
    pytest.param(responses, marks=pytest.mark.plugin("responses")),
)
WIRES = {
    messages: ("diagnostics", {"cache_miss_reason": {"type": "unavailable"}}),
    responses: ("prompt_cache_diagnostics", {"type": "unavailable"}),
}


def report_load(running: Fleet, turn: Turn, num_open: int) -> None:
    """Let the gateway learn how many requests the replica of a turn has, also from other gateways."""
    name = turn.replica.name
    known = running.watch.upstreams[name].report
    keys = array("Q", [0]) * MOST_KEYS  # as of a replica that holds more than it reports
    number = known.number + 2**20 + next(NUMBERS)
    report = ReplicaReport(name, known.incarnation, number, num_open, 0, keys, models=known.models)
    running.gateway.router.learn(report, running.runtime.clock_ns())


@pytest.mark.parametrize("ask", ROUTES)
def test_a_changed_system_message_is_named_behind_a_gateway(place: Place, ask: Callable[..., Turn]) -> None:
    with fleet(place, 1, kv_blocks=2048) as running:
        before = ask(running, QUESTION)
        turn = ask(running, QUESTION, time="12:01", before=None if ask is chat else before.id)
        account = running.http.get(f"/debug/requests/{turn.record.request_id}").json()
    record = turn.record
    assert (record.read_again_reason, record.reuse["compared_with"]) == (ReadAgain.SYSTEM, before.record.request_id)
    assert turn.http.headers["x-oaiserve-read-again"] == f"{record.read_again_tokens}; reason=system"
    assert (account["read_again_tokens"], account["read_again_reason"]) == (record.read_again_tokens, "system")
    if ask is messages:
        assert turn.http.json()["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    elif ask is responses:
        assert turn.http.json()["prompt_cache_diagnostics"]["reason"] == "input_changed"


@pytest.mark.parametrize("ask", ROUTES)
def test_a_turn_at_another_replica_says_that_the_first_one_has_its_beginning(
    two: Fleet, ask: Callable[..., Turn]
) -> None:
    before = ask(two, QUESTION)
    report_load(two, before, MANY)
    turn = ask(two, *TALK, before=None if ask is chat else before.id)
    record = turn.record
    assert turn.replica is not before.replica
    assert record.read_again_reason is ReadAgain.OTHER_REPLICA
    assert 0 < record.read_again_tokens <= before.record.prompt_tokens
    assert turn.http.headers["x-oaiserve-read-again"] == f"{record.read_again_tokens}; reason=other_replica"
    if ask is not chat:
        name, unavailable = WIRES[ask]
        assert turn.http.json()[name] == unavailable


@pytest.mark.parametrize("ask", ROUTES[1:])
def test_an_answer_that_this_replica_does_not_know_may_be_of_another(two: Fleet, ask: Callable[..., Turn]) -> None:
    name, unavailable = WIRES[ask]
    assert ask(two, QUESTION, before="of-another-replica").http.json()[name] == unavailable


def test_a_key_is_not_told_what_another_replica_has_which_may_be_of_another_key(place: Place) -> None:
    server = replace(BEHIND_A_GATEWAY, api_key=("first", "second"))
    with fleet(place, 2, kv_blocks=2048, server=server, route=RouteOptions(replica_key="first")) as running:
        running.http.headers["authorization"] = "Bearer first"
        before = chat(running, QUESTION)
        report_load(running, before, MANY)
        running.http.headers["authorization"] = "Bearer second"
        turn = chat(running, QUESTION)
    assert turn.replica is not before.replica
    assert turn.record.routing["reason"] == "spilled"
    assert (turn.record.read_again_reason, turn.record.read_again_tokens) == (None, 0)


def test_a_turn_that_returns_to_the_first_replica_reads_again_what_the_second_has(two: Fleet) -> None:
    first = chat(two, QUESTION)
    report_load(two, first, MANY)
    second = chat(two, *TALK, *LONG_TURN)
    for _ in range(20):  # The gateway believes each report by half.
        report_load(two, first, 0)
    report_load(two, second, MANY)
    third = chat(two, *TALK, *LONG_TURN, {"role": "assistant", "content": "Because."}, QUESTION)
    assert (second.replica is first.replica, third.replica is first.replica) == (False, True)
    assert third.record.routing["reason"] == "shorter_prefix"
    assert third.record.cached_tokens > 0.9 * first.record.prompt_tokens
    assert third.record.reuse["compared_with"] == first.record.request_id
    assert third.record.read_again_reason is ReadAgain.OTHER_REPLICA
