"""Files and batches: OpenAI's client works with them, and no line is lost or doubled, whenever a server ends."""

import asyncio
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI

from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from oaiserve.engine.request import Deliver, Request
from oaiserve.errors import Overloaded
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.plugins.batches import plugin, runner
from oaiserve.plugins.batches.objects import BatchObject
from oaiserve.plugins.batches.store import BatchStore, Line
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.adaptations import HEADER
from oaiserve.wire.continuation import IDS_HEADER, StreamIds
from tests.batching import CHAT, answers, begin, ended, jsonl, line, wait_for_answers
from tests.nesting import TOO_DEEP
from tests.routes.doubles import FakeEngine, FakeTelemetry, says
from tests.serving import Serve, Served
from tests.world.serving import Place, WorldServed, serving


@pytest.fixture
def sdk(served: Served) -> Iterator[OpenAI]:
    with served.sdk() as sdk:
        yield sdk


def test_a_line_says_how_its_request_was_adapted(sdk: OpenAI) -> None:
    lenient = line(2, messages=[{"role": "user", "content": [{"text": "Hi"}]}])
    batch = ended(sdk, begin(sdk, line(1), lenient))
    exact, adapted = (one["response"] for one in answers(sdk, batch.output_file_id))
    assert exact.keys() == {"status_code", "request_id", "body"}
    note = "messages[0].content[0]: has no type, and is read as text"
    assert adapted == {**adapted, "status_code": 200, "headers": {"x-oaiserve-adapted": note}}


def test_a_wish_that_a_batch_leaves_out_is_told(served: Served, sdk: OpenAI) -> None:
    file = sdk.files.create(file=("in.jsonl", jsonl(line(1))), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    created = served.post("/v1/batches", **body, output_expires_after={"anchor": "created_at", "seconds": 3600})
    assert created.headers[HEADER] == "output_expires_after: is left out: files stay until they are deleted"
    ended(sdk, sdk.batches.retrieve(created.json()["id"]))


def test_a_batch_is_answered_in_the_background_and_openais_client_reads_it(served: Served, sdk: OpenAI) -> None:
    batch = begin(sdk, *map(line, range(1, 301)))
    assert (batch.status, batch.endpoint, batch.metadata) == ("in_progress", CHAT, {"a": "b"})
    assert batch.expires_at - batch.created_at == 24 * 3600
    batch = ended(sdk, batch)
    counts = batch.request_counts
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("completed", 300, 300, 0)
    assert (batch.usage.input_tokens, batch.usage.output_tokens, batch.usage.total_tokens) == (900, 600, 1500)
    lines = answers(sdk, batch.output_file_id)
    assert [one["custom_id"] for one in lines] == [f"line-{number}" for number in range(1, 301)]
    assert {one["response"]["body"]["choices"][0]["message"]["content"] for one in lines} == {"Hello world"}
    assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in lines)
    assert len({one["id"] for one in lines}) == len({one["response"]["request_id"] for one in lines}) == 300
    assert batch.error_file_id is None
    requests = [served.engine.submitted.get_nowait() for _ in range(300)]
    assert all(one.is_background for one in requests)
    assert all(served.telemetry.records.get_nowait().background for _ in range(300))


def test_files_are_listed_read_and_deleted(sdk: OpenAI) -> None:
    content = jsonl(line(1), line(2)).replace(b"\n", b"\r\n")
    files = [sdk.files.create(file=(f"{name}.jsonl", content), purpose="batch") for name in "ab"]
    assert [(one.filename, one.bytes, one.purpose) for one in files] == [
        (f"{name}.jsonl", len(content), "batch") for name in "ab"
    ]
    assert [one.id for one in sdk.files.list(limit=1)][:2] == [files[1].id, files[0].id], "it reads all pages"
    assert sdk.files.retrieve(files[0].id) == files[0]
    assert sdk.files.content(files[0].id).read() == content
    assert sdk.files.delete(files[0].id).deleted
    for ask in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            ask(files[0].id)


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", 1),
        (jsonl(line(1)) + b"no json\n", "invalid_json_line", 2),
        (jsonl(line(1), line(2, url="/v1/completions")), "mismatched_url", 2),
        (jsonl(line(1), line(1)), "duplicate_custom_id", 2),
        (jsonl(line(1, stream=True)), "unsupported_parameter", 1),
    ],
)
def test_a_file_with_a_wrong_line_makes_a_batch_that_has_failed(
    sdk: OpenAI, content: bytes, code: str, number: int
) -> None:
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert batch.status == "failed"
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]
    assert ended(sdk, batch).failed_at is not None


def test_a_line_that_is_refused_is_in_the_file_of_errors_and_the_others_go_on(sdk: OpenAI) -> None:
    batch = ended(sdk, begin(sdk, line(1), line(2, temperature=-3), line(3, model="nobody")))
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 1, 2)
    assert [one["custom_id"] for one in answers(sdk, batch.output_file_id)] == ["line-1"]
    refused = answers(sdk, batch.error_file_id)
    assert [(one["custom_id"], one["response"]["status_code"]) for one in refused] == [("line-2", 400), ("line-3", 404)]
    assert refused[0]["response"]["body"]["error"]["param"] == "temperature"


def test_half_of_a_surrogate_pair_is_read_as_by_the_route_and_fails_no_other_line(served: Served, sdk: OpenAI) -> None:
    cut = line(1, messages=[{"role": "user", "name": "\ud83d", "content": "Hi"}])
    batch = ended(sdk, begin(sdk, cut, line(2, stop="\ud83d"), line(3)))
    counts = batch.request_counts
    assert (batch.status, counts.completed, counts.failed) == ("completed", 2, 1)
    prompts = [served.engine.submitted.get_nowait().prompts[0] for _ in range(2)]
    assert prompts[0].messages[0]["name"] == "\N{REPLACEMENT CHARACTER}"  # type: ignore[union-attr]
    (refused,) = answers(sdk, batch.error_file_id)
    assert "half of a surrogate pair" in refused["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"method": "GET"}, "Invalid 'method': must be 'POST', got 'GET'"),
        ({"custom_id": 5}, "Invalid 'custom_id': must be a string, got an integer"),
        ({"custom_id": "a\ud83d"}, "'custom_id' has half of a surrogate pair, which is no character"),
        ({"body": []}, "Invalid body: must be an object, got a list"),
        ({"body": {"stream": 1}}, "Invalid 'stream': must be true or false, got an integer"),
        ({"body": {"a": "DEEP"}}, "it is nested too deeply"),
    ],
)
def test_error_of_a_line_says_what_is_allowed(sdk: OpenAI, wrong: dict[str, Any], says: str) -> None:
    content = jsonl(line(1) | wrong).replace(b'"DEEP"', b"[" * TOO_DEEP + b"]" * TOO_DEEP)
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    batch = sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert [error.message for error in batch.errors.data] == [f"The line is no request of a batch: {says}."]


def test_each_answer_is_one_line_however_lines_are_split(served: Served, sdk: OpenAI) -> None:
    breaks = "a\x85b\u2028c\u2029d\r\n\x0b\x0c\x1c\x1d\x1ee"
    served.engine.script = says(breaks)
    (answered,) = answers(sdk, ended(sdk, begin(sdk, line(1) | {"custom_id": breaks})).output_file_id)
    assert answered["custom_id"] == answered["response"]["body"]["choices"][0]["message"]["content"] == breaks


def test_all_clients_that_cancel_a_batch_at_once_get_the_ended_one(served: Served, sdk: OpenAI) -> None:
    served.engine.script = waits_for(3)
    batch = begin(sdk, *map(line, range(1, 41)))
    wait_for_answers(sdk, batch, 3)
    with ExitStack() as stack:
        connections = [stack.enter_context(served.connect()) for _ in range(8)]
        for connection in connections:
            connection.sendall(f"POST /v1/batches/{batch.id}/cancel HTTP/1.0\r\nhost: localhost\r\n\r\n".encode())
        cancelled = [b"".join(iter(lambda each=each: each.recv(65536), b"")) for each in connections]
    assert ["200" in one.split(b"\r\n")[0].decode() for one in cancelled] == [True] * 8
    assert all(b'"status":"cancelled"' in one for one in cancelled)


@pytest.mark.parametrize(
    ("endpoint", "body", "used"),
    [
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 4}, 3),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}, 3),
    ],
)
def test_other_routes_are_answered_too(sdk: OpenAI, endpoint: str, body: dict[str, Any], used: int) -> None:
    batch = begin(sdk, {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}, endpoint=endpoint)
    assert batch.oaiserve == {"prompt_tokens": 2, "output_tokens": 4, "expected_seconds": None}
    batch = ended(sdk, batch)
    assert (batch.request_counts.completed, batch.usage.input_tokens) == (1, used)


def test_the_cost_is_estimated_before_a_batch_begins(served: Served, sdk: OpenAI) -> None:
    served.engine.step_cost = StepCost(tuple(1e6 * knot for knot in KNOTS))
    batch = begin(sdk, *(line(10 + number, max_tokens=100) for number in range(80)))
    served.engine.step_cost = None
    # A prompt token takes 1 ms here, and so does a row of a step.
    assert ended(sdk, batch).status == "completed"
    assert batch.oaiserve == {"prompt_tokens": 720, "output_tokens": 8000, "expected_seconds": 8.7}


def waits_for(number: int) -> Callable[[Request], Any]:
    """Return a script that answers some requests, and leaves the others without an answer."""
    left = iter(range(number))

    def script(request: Request) -> Any:
        return says("Hello", " world")(request) if next(left, None) is not None else []

    return script


def test_a_batch_is_cancelled_with_what_it_has(served: Served, sdk: OpenAI) -> None:
    served.engine.script = waits_for(3)
    batch = begin(sdk, *map(line, range(1, 41)))
    wait_for_answers(sdk, batch, 3)
    batch = sdk.batches.cancel(batch.id)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 3, 0)
    assert not served.engine.open, "what was under way is aborted"
    assert batch.cancelling_at == batch.cancelled_at is not None
    assert [one["error"]["code"] for one in answers(sdk, batch.error_file_id)] == ["batch_cancelled"] * 37
    assert sdk.batches.cancel(batch.id) == batch


def test_batch_goes_on_after_a_cancellation_that_could_not_be_stored(
    served: Served, sdk: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "CHECK_SECONDS", 0.01)
    served.engine.script = waits_for(3)
    batch = wait_for_answers(sdk, begin(sdk, *map(line, range(1, 41))), 3)
    with monkeypatch.context() as patched:
        patched.setattr(BatchObject, "end", disk_is_full)
        with pytest.raises(openai.InternalServerError, match="store of responses"):
            sdk.batches.cancel(batch.id)
    served.engine.script = says("Hello", " world")
    batch = ended(sdk, batch)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 40, 0)


def test_no_line_begins_after_its_batch_was_cancelled_while_lines_were_read(
    served: WorldServed, sdk: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = BatchStore.next_lines
    taken: list[str] = []
    is_cancelled = asyncio.Event()

    async def next_lines(store: BatchStore, batch_id: str, after: int) -> list[Line]:
        lines = await take(store, batch_id, after)
        taken.append(batch_id)
        await is_cancelled.wait()
        return lines

    monkeypatch.setattr(BatchStore, "next_lines", next_lines)
    batch = begin(sdk, line(1))
    served.settle()
    assert taken
    assert sdk.batches.cancel(batch.id).status == "cancelled"
    is_cancelled.set()
    assert ended(sdk, begin(sdk, line(2))).request_counts.completed == 1
    assert served.engine.submitted.qsize() == 1


def test_batches_go_on_after_a_fault(
    served: Served, sdk: OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "CHECK_SECONDS", 0.01)
    take = BatchStore.next_lines
    is_faulty = [True]

    async def next_lines(store: BatchStore, batch_id: str, after: int) -> list[Line]:
        if is_faulty:
            raise ValueError(f"no such thing was expected {is_faulty.pop()}")
        return await take(store, batch_id, after)

    monkeypatch.setattr(BatchStore, "next_lines", next_lines)
    assert ended(sdk, begin(sdk, line(1))).request_counts.completed == 1
    assert "no such thing was expected" in caplog.text


def disk_is_full(*_: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_batch_that_expires_keeps_its_answers(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECK_SECONDS", 0.01)
    engine = FakeEngine(runtime=place.world)
    engine.script = waits_for(1)
    config = Config("org/demo", ServerOptions())
    app = create_app(config, engine, FakeTelemetry(place.world), plugins=[plugin], runtime=place.world)
    with place.running(app) as url, place.sdk_of(url) as sdk:
        batch = wait_for_answers(sdk, begin(sdk, line(1), line(2)), 1)
        place.world.pause(25 * 3600)
        place.world.settle()
        batch = ended(sdk, batch)
        assert (batch.status, batch.request_counts.completed) == ("expired", 1)
        assert [one["error"]["code"] for one in answers(sdk, batch.error_file_id)] == ["batch_expired"]


def test_a_line_that_the_server_has_no_room_for_comes_again(
    served: WorldServed, sdk: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.001)
    served.engine.submit_error = Overloaded("full")
    batch = begin(sdk, line(1))
    served.settle()
    assert not served.telemetry.records.empty()
    served.engine.submit_error = None
    assert ended(sdk, batch).request_counts.completed == 1


def test_a_line_comes_again_however_often_it_was_refused(
    served: Served, sdk: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a pause of a minute each, a key whose limit is for a day refuses a line 1,100 times in 18 hours."""
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.0)
    submit = served.engine.submit
    refusals = iter(range(1100))

    def submit_at_last(request: Request, deliver: Deliver) -> None:
        if next(refusals, None) is not None:
            raise Overloaded("full")
        submit(request, deliver)

    monkeypatch.setattr(served.engine, "submit", submit_at_last)
    assert ended(sdk, begin(sdk, line(1))).request_counts.completed == 1


def test_answers_are_read_while_they_come(served: WorldServed, sdk: OpenAI) -> None:
    served.engine.script = waits_for(3)
    batch = begin(sdk, *map(line, range(1, 8)))
    content = b""
    after = "0"
    for _ in range(3):
        answer = served.http.get(f"/v1/batches/{batch.id}/answers", params={"after": after})
        content += answer.content
        after = answer.headers["x-after"]
        served.settle()
    assert (after, content.count(b"\n")) == ("3", 3)
    assert {json.loads(text)["custom_id"] for text in content.splitlines()} == {"line-1", "line-2", "line-3"}
    sdk.batches.cancel(batch.id)


def test_a_server_without_batches_says_why(place: Place) -> None:
    with serving(place, Config("demo", of_plugins=(StoreOptions(response_store_number=0),))) as served:
        assert "--response-store-number 0" in served.http.get("/v1/batches").json()["error"]["message"]


@pytest.mark.plugin("responses")
def test_what_a_gateway_asks_for_again_is_made_once(serve: Serve) -> None:
    """A server may end after the write and before its answer. Then the gateway asks another one of the same store."""
    served = serve(trusted_proxy=("127.0.0.1",))
    repeated: list[tuple[str, dict[str, Any]]] = [
        ("files", {"files": {"file": jsonl(line(0))}, "data": {"purpose": "batch"}}),
        ("batches", {"json": {"endpoint": CHAT, "completion_window": "24h"}}),
        ("conversations", {"json": {"items": [{"role": "user", "content": "Hi"}]}}),
        ("conversations/{}/items", {"json": {"items": [{"role": "user", "content": "You"}]}}),
    ]
    ids: dict[str, str] = {}
    for number, (path, content) in enumerate(repeated):
        if path == "batches":
            content["json"]["input_file_id"] = ids["files"]
        headers = {IDS_HEADER: StreamIds(f"{number}" * 32, 1, 2).as_text}
        url = f"/v1/{path.format(ids.get('conversations'))}"
        answers = [served.http.post(url, headers=headers, **content).json() for _ in range(2)]
        assert answers[0].get("id") == answers[1].get("id")
        ids[path] = answers[0].get("id", "")
    items = served.http.get(f"/v1/conversations/{ids['conversations']}/items?order=asc").json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hi", "You"]
    with served.sdk() as sdk:
        assert [one.id for one in sdk.files.list() if one.purpose == "batch"] == [ids["files"]]
        assert [one.id for one in sdk.batches.list()] == [ids["batches"]]
        ended(sdk, sdk.batches.retrieve(ids["batches"]))


# -- the end of a server, at any moment --------------------------------------------------------------------------------


def app_of(place: Place, path: Path, engine: FakeEngine) -> Any:
    config = Config("org/demo", of_plugins=(StoreOptions(response_store=path),))
    return create_app(config, engine, FakeTelemetry(place.world), runtime=place.world)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ends=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_wherever_servers_end_no_line_is_lost_or_doubled(
    ends: list[int], place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("store") / "responses.db"
    total = sum(ends) + 10
    done = 0
    batch = None
    for number in [*ends, 10**6]:
        engine = FakeEngine(runtime=place.world)
        engine.script = waits_for(number)
        with place.running(app_of(place, path, engine)) as url, place.sdk_of(url) as sdk:
            batch = begin(sdk, *map(line, range(1, 1 + total))) if batch is None else sdk.batches.retrieve(batch.id)
            done += number
            if done < total:
                wait_for_answers(sdk, batch, done)
                continue
            batch = ended(sdk, batch)
            lines = answers(sdk, batch.output_file_id)
    assert [one["custom_id"] for one in lines] == [f"line-{number}" for number in range(1, 1 + total)]
    assert (batch.request_counts.completed, batch.request_counts.failed) == (total, 0)
    assert batch.usage.output_tokens == 2 * total, "what was begun twice counts once"


def test_of_servers_with_one_store_the_first_computes_the_batches(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    with ExitStack() as stack:
        engines = [FakeEngine(runtime=place.world), FakeEngine(runtime=place.world)]
        urls = [stack.enter_context(place.running(app_of(place, path, engine))) for engine in engines]
        one, two = (stack.enter_context(place.sdk_of(url)) for url in urls)
        for begins, asks in ((one, two), (two, one)):
            batch = ended(asks, begin(begins, line(1)))
            assert batch.status == "completed"
            assert asks.batches.cancel(batch.id) == batch
        assert engines[0].submitted.qsize() == 2
        assert engines[1].submitted.empty()
        engines[0].script = waits_for(2)
        batch = begin(two, *map(line, range(1, 8)))
        wait_for_answers(two, batch, 2)
        batch = two.batches.cancel(batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("cancelled", 2, 0)
        place.world.settle(2 * runner.SHARED_CHECK_SECONDS)
        assert not engines[0].open, "the first process does not see the cancellation in the store"
        assert one.batches.retrieve(batch.id) == batch


def test_the_batches_of_a_server_that_has_ended_go_on_in_another_one(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    engine, another = (FakeEngine(runtime=place.world) for _ in range(2))
    with ExitStack() as first:
        first.enter_context(place.running(app_of(place, path, engine)))
        engine.script = waits_for(2)
        with place.running(app_of(place, path, another)) as other, place.sdk_of(other) as sdk:
            batch = begin(sdk, *map(line, range(1, 8)))
            wait_for_answers(sdk, batch, 2)
            first.close()
            assert ended(sdk, batch).request_counts.completed == 7


def test_the_lines_of_a_key_that_was_revoked_are_refused(place: Place, tmp_path: Path) -> None:
    engine = FakeEngine(runtime=place.world)
    keys = tmp_path / "keys"
    path = tmp_path / "responses.db"
    engine.script = waits_for(0)
    keys.write_text("a old\nb new\n")
    options = ServerOptions(api_key_file=(keys,))
    config = Config("m", options, of_plugins=(StoreOptions(response_store=path),))
    with (
        place.running(create_app(config, engine, FakeTelemetry(), runtime=place.world), options) as url,
        place.sdk_of(url, "old") as sdk,
    ):
        begin(sdk, line(1))
    keys.write_text("b new\n")
    app = create_app(config, engine, FakeTelemetry(), runtime=place.world)
    with place.running(app, options), closing(sqlite3.connect(path)) as database:
        query = "SELECT result FROM stored_lines"
        place.world.settle(2 * runner.SHARED_CHECK_SECONDS)
        row = database.execute(query).fetchone()
    assert json.loads(row[0])["response"]["status_code"] == 401


DEEP = b"[" * 100_000 + b"]" * 100_000
MESSAGES = b'"messages": [{"role": "user", "content": "Hi"}], '
HOSTILE_BODIES = (
    *(b'{"messages": %s}' % value for value in (DEEP, b"[" * 900 + b"]" * 900, b"1e400")),
    b'{"messages": "\\ud83d"}', b'{"messages": "\xed\xa0\x80"}',
    b'{"messages": [{"role": "user", "content": "\\u0000"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud83d\\ud83d"}]}',
    *(b"{%b%b}" % (MESSAGES, field) for field in (
        b'"max_tokens": 1e400', b'"max_tokens": -99999999999999999999', b'"stream": 1e400', b'"n": ' + b"9" * 400,
        b'"n": ' + DEEP, b'"n": [' + b"1.5," * 100_000 + b"1]", b'"extra_body": ' + b"[" * 1800 + b"]" * 1800,
    )),
    b"[]", b"null", b"1e400", b'"text"', b"", b"{", DEEP,
)  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE_BODIES, ids=[f"{body[:40]!r}" for body in HOSTILE_BODIES])
def test_a_hostile_line_fails_by_itself_or_with_its_batch(served: Served, sdk: OpenAI, body: bytes) -> None:
    content = jsonl(line(1)) + b'{"custom_id": "x", "method": "POST", "url": "%s", "body": %s}\n' % (
        CHAT.encode(),
        body,
    )
    file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
    batch = ended(sdk, sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
    assert len(batch.to_json()) < 4000
    if batch.status == "failed":
        assert [(error.code, error.line) for error in batch.errors.data] == [("invalid_json_line", 2)]
    else:
        refused = answers(sdk, batch.error_file_id) if batch.error_file_id else []
        assert (batch.status, batch.request_counts.completed + len(refused)) == ("completed", 2)
        assert [one["response"]["status_code"] for one in refused] == [400] * len(refused)
        # From Python 3.12 on, an unknown parameter that is nested so deeply is read.
        assert refused or b"u0000" in body or b"extra_body" in body


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (jsonl(line(1) | {"custom_id": "x" * 513}), "custom_id_too_long"),
        (jsonl(line(1, pad="x" * 10_000)), "line_too_long"),
        (jsonl(line(1) | {"method": "GET" * 1000}), "invalid_json_line"),
    ],
)
def test_a_line_beyond_a_bound_is_named_in_a_short_error(serve: Serve, content: bytes, code: str) -> None:
    with serve(body_limit=10_000).sdk() as sdk:
        file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
        batch = sdk.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert [(error.code, len(error.message) < 500) for error in batch.errors.data] == [(code, True)]
