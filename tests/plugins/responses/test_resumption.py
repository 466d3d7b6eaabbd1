"""Responses in the background outlive their process: another one finds them and makes them again, and no two do so.

A process that is killed does nothing more. So a copy of its store, made while it works, is what it leaves behind.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.errors import APIError, InvalidRequest, Overloaded
from oaiserve.plugins.responses import resumption
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.wire.continuation import IDS_HEADER, StreamIds
from tests.plugins.responses.test_background import ENDS, begin, data_of, followed, following, go_on, read
from tests.routes.asking import RESPONSES, bearer, refused
from tests.routes.doubles import FakeEngine, FakeTelemetry, Script, fails, says, starts
from tests.serving import Served
from tests.world.serving import Place, WorldServed

KEY = "first-key-0123456789"
OTHER_KEY = "other-key-0123456789"
LATER_SECONDS = 0.5  # A server has looked into its store several times by then.


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumption, "LOOK_SECONDS", 0.01)


@dataclass(frozen=True)
class Store:
    """The file of a store, in a world."""

    file: Path
    place: Place


@contextmanager
def server(
    path: Store, script: Script, *keys: str, refusal: APIError | None = None, **limits: int
) -> Iterator[WorldServed]:
    """Serve with this store, with the first of these keys for `Served.http`. The engine refuses with `refusal`."""
    place = path.place
    engine = FakeEngine(runtime=place.world)
    engine.script = script
    engine.submit_error = refusal
    telemetry = FakeTelemetry(place.world)
    options = ServerOptions(api_key=keys, drain_timeout_seconds=0, trusted_proxy=("127.0.0.1",))
    config = Config("org/demo", options, of_plugins=(StoreOptions(response_store=path.file, **limits),))
    app = create_app(config, engine, telemetry, runtime=place.world)
    headers = bearer(keys[0]) if keys else {}
    with place.running(app, options) as url, place.client_of(url) as http:
        http.headers.update(headers)
        yield WorldServed(url, engine, telemetry, http, place=place)


@pytest.fixture
def path(place: Place, tmp_path: Store) -> Store:
    return Store(tmp_path / "responses.db", place)


def left_behind(path: Store, *changes: str) -> Store:
    """Return the store that the processes of a store would leave behind if they were killed now, after `changes`."""
    copy = path.file.with_name(f"killed-{path.file.name}")
    with closing(sqlite3.connect(path.file)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
        for change in changes:
            target.execute(f"UPDATE background_responses SET {change}")
        target.commit()
    return replace(path, file=copy)


def read_later(served: WorldServed, response_id: str, status: str) -> dict[str, Any]:
    """Return a response that has this status in a moment."""
    served.settle(LATER_SECONDS)
    answer = read(served, response_id)
    assert answer["status"] == status
    return answer


def status_of(served: Served, response_id: str) -> int:
    return served.http.get(f"{RESPONSES}/{response_id}").status_code


@pytest.mark.parametrize("script", [starts(), starts("Hel")], ids=["queued", "running"])
def test_response_of_a_killed_server_is_found_and_made_again(path: Store, script: Script) -> None:
    with server(path, script) as first:
        response_id = begin(first, metadata={"a": "b"}, background_options={"completion_window": "8h"})
        if any(script(first.engine.submitted.get())):
            read_later(first, response_id, "in_progress")
        before = read(first, response_id)
        left = left_behind(path)
    with server(left, starts()) as second:
        found = read(second, response_id)
        assert (found["status"] in ("queued", "in_progress"), found["metadata"]) == (True, {"a": "b"})
        request = second.engine.submitted.get()
        assert (request.is_background, request.request_id) == (True, response_id)
        items = second.http.get(f"{RESPONSES}/{response_id}/input_items").json()["data"]
        assert items[0]["content"][0]["text"] == "Hi"
        go_on(second, "Hello")
        answer = read_later(second, response_id, "completed")
        assert answer["output"][0]["content"][0]["text"] == "Hello"
        assert answer["created_at"] == before["created_at"]
    with server(left, says("again")) as third:
        assert read(third, response_id) == answer
        assert third.engine.submitted.empty()


def test_response_is_made_again_with_the_seed_that_it_had(path: Store) -> None:
    with server(path, starts("Hel")) as first:
        for seed in (None, 7):
            begin(first, seed=seed)
        seeds = {request.request_id: request.params.seed for request in taken(first, 2)}
        assert 7 in seeds.values()
        left = left_behind(path)
    with server(left, says("Hello")) as second:
        assert {request.request_id: request.params.seed for request in taken(second, 2)} == seeds


def taken(served: Served, number: int) -> list[Any]:
    return [served.engine.submitted.get() for _ in range(number)]


def test_response_that_was_made_again_waits_for_other_work_no_longer_than_it_would_have(path: Store) -> None:
    with server(path, starts()) as first:
        begin(first, background_options={"completion_window": "2h"})
        left = left_behind(path, "stream_ids = replace(stream_ids, ' 1', ' 0')")  # accepted long ago
    with server(left, starts()) as second:
        assert second.engine.submitted.get().background_wait_ns == 0


def test_stream_of_a_response_goes_on_after_its_server_was_killed(path: Store) -> None:
    with server(path, starts("Hel")) as first:
        response_id = begin(first)
        with following(first, response_id) as events:
            seen = [next(events) for _ in range(6)]
            left = left_behind(path)
    assert seen[-1]["delta"] == "Hel"
    with server(left, starts("Hel")) as second:
        with following(second, response_id, starting_after=seen[-1]["sequence_number"]) as events:
            read_later(second, response_id, "in_progress")
            go_on(second, "lo")
            rest = list(events)
        assert [event["sequence_number"] for event in rest] == list(range(6, 6 + len(rest)))
        assert (rest[0]["delta"], rest[-1]["type"]) == ("lo", "response.completed")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("expires_at = 0", "time for its completion is over"),
        ("num_deaths = 2", "ended 3 times while it made this response"),
    ],
)
def test_response_that_is_given_up_says_why(path: Store, change: str, reason: str) -> None:
    with server(path, starts("Hel")) as first:
        response_id = begin(first)
        left = left_behind(path, change)
    with server(left, says("Hello")) as second:
        assert reason in read_later(second, response_id, "failed")["error"]["message"]
        assert second.engine.submitted.empty()
        last = read(second, response_id)
    with server(left, says("Hello")) as third:
        assert read(third, response_id) == last, "it stays failed"


def test_response_during_which_servers_died_is_made_alone_after_the_others(path: Store) -> None:
    with server(path, starts()) as first:
        ids = [begin(first) for _ in range(3)]
        left = left_behind(path, f"num_deaths = id IN ('{ids[0]}', '{ids[1]}')")
    with server(left, starts()) as second:
        order = []
        for _ in ids:
            order.append(second.engine.submitted.get().request_id)
            second.settle()
            assert [*second.engine.open] == order[-1:]
            go_on(second, "Hello")
            read_later(second, order[-1], "completed")
    assert order == [ids[2], ids[0], ids[1]]


def test_response_that_is_refused_when_it_is_made_again_fails_with_the_reason(path: Store) -> None:
    with server(path, starts()) as first:
        response_id = begin(first)
        left = left_behind(path)
    with server(left, fails(InvalidRequest("The template is gone."))) as second:
        assert read_later(second, response_id, "failed")["error"]["message"] == "The template is gone."


def test_response_that_is_refused_for_the_moment_is_tried_again_and_can_be_cancelled_or_deleted(path: Store) -> None:
    with server(path, starts()) as first:
        cancelled, deleted, made = (begin(first) for _ in range(3))
        left = left_behind(path)
    with server(left, says("Hello"), refusal=Overloaded("Full.")) as second:
        second.settle(LATER_SECONDS)
        assert second.telemetry.records.qsize() >= 3
        answer = second.post(f"{RESPONSES}/{cancelled}/cancel").json()
        assert (answer["status"], answer["output"]) == ("cancelled", [])
        assert second.http.delete(f"{RESPONSES}/{deleted}").json()["deleted"] is True
        assert read(second, made)["status"] == "queued"
        second.engine.submit_error = None
        read_later(second, made, "completed")
        assert read(second, cancelled) == answer
        assert status_of(second, deleted) == 404
        assert second.engine.submitted.qsize() == 1
    with server(left, says("Hello")) as third:
        assert read(third, cancelled) == answer
        assert status_of(third, deleted) == 404


def test_response_with_a_model_that_is_not_here_waits_for_its_server(path: Store) -> None:
    with server(path, starts()) as first:
        here = begin(first)
        elsewhere = begin(first)
        left = left_behind(path, f"model = CASE id WHEN '{elsewhere}' THEN 'other' ELSE model END")
    with server(left, says("Hello")) as second:
        read_later(second, here, "completed")
        assert read(second, elsewhere)["status"] == "queued"


def test_response_is_only_for_its_own_key_before_and_after_its_server_was_killed(path: Store) -> None:
    with server(path, starts(), KEY, OTHER_KEY) as first:
        response_id = begin(first)
        left = left_behind(path)
        assert asked_by(first, OTHER_KEY, response_id) == [404] * 4
    with server(left, starts(), KEY, OTHER_KEY) as second:
        assert asked_by(second, OTHER_KEY, response_id) == [404] * 4
        clients = [request.client for served in (first, second) for request in taken(served, 1)]
        assert clients[0] == clients[1]
        go_on(second, "Hello")
        read_later(second, response_id, "completed")
        assert asked_by(second, OTHER_KEY, response_id) == [404] * 4


def test_response_whose_key_was_removed_is_not_made_again(path: Store) -> None:
    with server(path, starts(), KEY) as first:
        begin(first)
        left = left_behind(path)
    with server(left, starts(), OTHER_KEY) as second:
        query = "SELECT response FROM background_responses WHERE NOT is_open"
        with closing(sqlite3.connect(left.file)) as store:
            second.settle(LATER_SECONDS)
            assert b"API key of this response is not valid" in store.execute(query).fetchone()[0]
        assert second.engine.submitted.empty()


def asked_by(served: Served, key: str, response_id: str) -> list[int]:
    url = f"{RESPONSES}/{response_id}"
    requests = (("GET", url), ("GET", f"{url}?stream=true"), ("POST", f"{url}/cancel"), ("DELETE", url))
    return [served.http.request(method, path, headers=bearer(key)).status_code for method, path in requests]


def test_unfinished_responses_have_limits_which_hold_after_a_kill(path: Store) -> None:
    with server(path, starts(), response_store_number=2) as first:
        ids = [begin(first), begin(first)]
        refused(first.post(RESPONSES, input="Hi", background=True), None, "2 of your responses", status=429)
        left = left_behind(path)
    with server(left, starts(), response_store_number=2) as second:
        refused(second.post(RESPONSES, input="Hi", background=True), None, "2 of your responses", status=429)
        second.post(f"{RESPONSES}/{ids[0]}/cancel")
        begin(second)
        assert read(second, ids[1])["status"] == "queued", "what is unfinished makes no room for others"
        assert status_of(second, ids[0]) == 404
    with server(path, starts(), response_store_bytes=10_000) as third:
        response = third.post(RESPONSES, input="Hi" * 6_000, background=True)
        refused(response, "background", "--response-store-bytes")


def test_shutdown_leaves_a_response_to_the_next_server(path: Store) -> None:
    with server(path, starts("Hel")) as first:
        response_id = begin(first)
        with following(first, response_id) as events:
            next(event for event in events if event["type"] == "response.output_text.delta")
            first.engine.drain()
            first.engine.abort(response_id)  # as the engine does when it stops
            assert not ENDS & {event["type"] for event in events}
    with closing(sqlite3.connect(path.file)) as store:
        assert store.execute("SELECT process, num_deaths FROM background_responses").fetchall() == [("", 0)]
    with server(path, says("Hello")) as second:
        assert read_later(second, response_id, "completed")["output"][0]["content"][0]["text"] == "Hello"


def test_response_that_was_stored_just_before_the_kill_is_not_made_again(path: Store) -> None:
    with server(path, says("Hello")) as first:
        response_id = begin(first)
        answer = followed(first, response_id)[-1]["response"]
        first.engine.script = starts()
        other = begin(first)
        left = left_behind(path, f"id = '{response_id}'")
    with server(left, says("again")) as second:
        second.settle(LATER_SECONDS)
        assert read(second, response_id) == answer
        assert status_of(second, other) == 404
        assert second.engine.submitted.empty()


# -- several servers with one store ------------------------------------------------------------------------------------


@contextmanager
def two_servers(path: Store) -> Iterator[tuple[WorldServed, WorldServed]]:
    with ExitStack() as stack:
        yield stack.enter_context(server(path, starts("Hel"))), stack.enter_context(server(path, starts("Hel")))


def test_response_is_made_by_one_of_the_servers_and_read_from_all(path: Store) -> None:
    with two_servers(path) as (one, two):
        response_id = begin(one)
        read_later(two, response_id, "in_progress")
        refused(
            two.http.get(f"{RESPONSES}/{response_id}", params={"stream": "true"}), "response_id", "another", status=404
        )
        go_on(one, "lo")
        assert read_later(two, response_id, "completed") == read(one, response_id)
        assert two.engine.submitted.empty()


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (lambda served, name: served.post(f"{RESPONSES}/{name}/cancel"), "cancelled"),
        (lambda served, name: served.http.delete(f"{RESPONSES}/{name}"), None),
    ],
    ids=["cancelled", "deleted"],
)
def test_response_that_another_server_makes_ends_there_too(
    path: Store, end: Callable[[Served, str], httpx.Response], status: str | None
) -> None:
    with two_servers(path) as (one, two):
        response_id = begin(one)
        read_later(two, response_id, "in_progress")
        assert end(two, response_id).status_code == 200
        assert one.engine.aborted.get() == response_id
        one.settle(LATER_SECONDS)
        assert not one.engine.open
        if status is None:
            assert status_of(one, response_id) == status_of(two, response_id) == 404
        else:
            assert read(two, response_id)["status"] == status
            read_later(one, response_id, status)


def test_of_two_servers_one_takes_over_what_a_third_has_left(path: Store) -> None:
    with server(path, starts("Hel")) as first:
        response_id = begin(first)
        left = left_behind(path)
    with two_servers(left) as (one, two):
        one.settle(LATER_SECONDS)
        maker, other = (one, two) if one.engine.submitted.qsize() else (two, one)
        assert maker.engine.open
        go_on(maker, "lo")
        read_later(other, response_id, "completed")
        assert maker.engine.submitted.qsize() == 1
        assert other.engine.submitted.empty()


def test_stream_that_begins_a_response_is_like_any_other_after_a_kill(path: Store) -> None:
    with server(path, starts("Hel")) as first:
        body = {"input": "Hi", "background": True, "stream": True}
        with first.http.stream("POST", RESPONSES, json=body) as response:
            response_id = next(data_of(response.iter_lines()))["response"]["id"]
            left = left_behind(path)
    with server(left, says("Hello")) as second:
        assert followed(second, response_id)[-1]["type"] == "response.completed"


def test_request_that_a_gateway_sends_again_begins_one_response(path: Store) -> None:
    with server(path, starts("Hel")) as served:
        headers = {IDS_HEADER: StreamIds("1" * 32, 1, 2).as_text}
        body = {"input": "Hi", "background": True}
        answers = [served.http.post(RESPONSES, json=body, headers=headers).json() for _ in range(2)]
        assert [answer["id"] for answer in answers] == [f"resp_{'1' * 32}"] * 2
        assert answers[1]["status"] in ("queued", "in_progress")
        assert served.engine.submitted.qsize() == 1
