"""Tests a server with stored keys: roles, limits, models and priorities; and changes while it runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import RateLimitError

from oaiserve.app import create_app, routes
from oaiserve.config import Config, EngineOptions, ServerOptions
from oaiserve.engine.request import Finished, Usage
from oaiserve.engine.types.adapters import ServedAdapter
from oaiserve.errors import Overloaded, StartupError
from oaiserve.facts.record import EngineAccount, OthersTime, Whose
from oaiserve.facts.times import RequestTimes
from oaiserve.http.keys import INTERVAL_SECONDS, Right
from oaiserve.plugin import Plugin
from oaiserve.plugin_loading import check, own_plugins, pages_of
from oaiserve.plugins.keys import with_runtime
from oaiserve.plugins.keys.key_table import KeyTable
from oaiserve.plugins.keys.options import KeysOptions
from oaiserve.plugins.shared.store_options import StoreOptions
from oaiserve.routes.door.access import OpenPaths, right_for
from oaiserve.routes.operation import operation_of
from tests.batching import begin, line
from tests.databases import opened_databases
from tests.missing_plugins import is_served
from tests.records import record_at
from tests.routes.asking import bearer
from tests.routes.doubles import FakeEngine, FakeTelemetry, fails, prompts_done, says, starts
from tests.routes.test_access import ALL_ROUTES, SPELLINGS, check_refused
from tests.world.serving import Place, WorldServed, serving

CHANGED_SECONDS = 2 * INTERVAL_SECONDS  # By then, a server has seen a change of the table.
RETRIED_SECONDS = 60.0  # By then, a line that was refused has come again.
RunServer = Callable[[], AbstractContextManager[WorldServed]]


def stored_in(file: Path) -> tuple[object, ...]:
    """Return the settings of a server with stored keys in this file."""
    return KeysOptions(stored_keys=True), StoreOptions(response_store=file)


def parts_in(place: Place) -> list[Plugin]:
    """Return the plug-ins of a server in this world."""
    return [with_runtime(place.world) if part.name == "keys" else part for part in own_plugins()]


@pytest.fixture
def table(place: Place, tmp_path: Path) -> Iterator[KeyTable]:
    with closing(KeyTable(tmp_path / "store", lambda: place.world.unix_ns() / 1e9)) as opened:
        yield opened


@pytest.fixture
def run(place: Place, tmp_path: Path) -> RunServer:
    """Return a function that serves with the keys of the table."""
    listed = ServerOptions(api_key=("listed",))
    config = Config("org/demo", listed, EngineOptions(lora_dir=tmp_path), of_plugins=stored_in(tmp_path / "store"))
    return lambda: serving(place, config, parts_in(place))


@contextmanager
def asking(run: RunServer, key: str) -> Iterator[WorldServed]:
    with run() as served:
        served.http.headers.update(bearer(key))
        yield served


def used(table: KeyTable) -> dict[str, Any]:
    (key,) = table.listed()
    return {name: key[f"{name}_today"] for name in ("requests", "tokens")}


def limits(headers: Any) -> list[str]:
    """Return limit and rest of requests, then of tokens."""
    names = [f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining")]
    return [headers[name] for name in names if name in headers]


@pytest.mark.parametrize("is_path", [False, True])
def test_a_key_may_have_a_model_by_its_name_or_its_path(
    is_path: bool, place: Place, table: KeyTable, tmp_path: Path
) -> None:
    file = tmp_path / "small.gguf"
    file.touch()
    config = Config(str(file), of_plugins=stored_in(tmp_path / "store"))
    key = table.add("alice", {"models": [str(file) if is_path else "small"]})
    with asking(lambda: serving(place, config, parts_in(place)), key) as served:
        for name in ("small", str(file)):
            assert served.complete(model=name).json()["model"] == "small"


def test_a_server_without_stored_keys_says_how_to_create_one(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config("demo", of_plugins=stored_in(tmp_path / "store"))
    engine = FakeEngine(runtime=place.world)
    app = create_app(config, engine, FakeTelemetry(place.world), plugins=parts_in(place), runtime=place.world)

    with place.running(app):
        pass

    assert "To create one: oaiserve keys add NAME" in caplog.text


def test_stored_keys_without_their_file_stop_the_start() -> None:
    config = Config("demo", of_plugins=(KeysOptions(stored_keys=True),))
    with pytest.raises(StartupError, match="--stored-keys needs --response-store"):
        check(own_plugins(), config)


# -- roles ------------------------------------------------------------------------------------------------------------


def test_every_route_of_a_group_needs_the_right_of_that_group() -> None:
    is_open = OpenPaths(pages_of(own_plugins()).shown(None), guard_all=True)
    rights_of_group: dict[str, set[Right]] = {}
    for route in routes(Config("demo", of_plugins=stored_in(Path("store")))):
        group = operation.group if (operation := operation_of(route.endpoint)) is not None else ""
        if not is_open(route.path):
            rights_of_group.setdefault(group, set()).add(right_for(route.path))
    assert rights_of_group.pop("Server") == {Right(0), Right.WATCH}  # probes, and metrics
    assert rights_of_group.pop("Debugging") == {Right.WATCH, Right.KEYS}
    assert rights_of_group.pop("Pages", {Right.WATCH}) == {Right.WATCH}
    assert Right.ADAPTERS in rights_of_group.pop("")  # the adapters' routes, which this server has not
    assert rights_of_group.pop("Models") == {Right(0)}
    assert {right for rights in rights_of_group.values() for right in rights} == {Right.USE}


PATHS = {"/v1/completions": 1, "/debug/requests": 2, "/debug/report": 2, "/dashboard/feed": 2, "/admin/keys": 3}


def test_each_role_has_its_routes_and_listed_keys_have_all_but_those_of_keys(run: RunServer, table: KeyTable) -> None:
    keys = {role: table.add(role, {"role": role}) for role in ("use", "watch", "admin")} | {"listed": "listed"}
    allowed = {"use": {1}, "watch": {2}, "admin": {1, 2, 3}, "listed": {1, 2}}
    with run() as served:
        for role, key in keys.items():
            for path in filter(is_served, PATHS):
                kind = PATHS[path]
                method = "POST" if kind == 1 else "HEAD" if path.endswith("feed") else "GET"
                response = served.http.request(method, path, headers=bearer(key), json={"prompt": "Hi"})
                assert response.status_code == (200 if kind in allowed[role] else 403), (role, path)
            load = served.http.post("/v1/load_lora_adapter", headers=bearer(key), json={})
            assert load.status_code == (403 if role in ("use", "watch") else 400)
            assert served.http.get("/v1/models", headers=bearer(key)).status_code == 200
        refused = served.http.get("/debug/requests", headers=bearer(keys["use"]))
        check_refused(refused, 403, "role_not_allowed", "'use'", "/debug/requests")
        assert served.telemetry.refused_access[-1] == "role"


@pytest.mark.parametrize("spelling", [*SPELLINGS, "{}%0a", "{}/%0a", "{}%0a/x"])
def test_no_spelling_of_a_route_is_open_to_another_role(run: RunServer, table: KeyTable, spelling: str) -> None:
    keys = {1: table.add("watch", {"role": "watch"}), 2: table.add("use", {}), 3: "listed"}
    with run() as served:
        for path, kind in PATHS.items():
            for encoded in (path, "".join(f"%{ord(c):02x}" if c.isalpha() else c for c in path)):
                method = "POST" if kind == 1 else "GET"
                url = served.url + spelling.format(encoded)
                response = served.http.request(method, url, headers=bearer(keys[kind]), json={"prompt": "Hi"})
                assert response.status_code in (403, 404), (url, response.text)


def test_admins_see_all_keys_and_what_they_use_but_no_key(run: RunServer, table: KeyTable) -> None:
    admin = table.add("admin", {"role": "admin", "models": ["org/demo"], "requests_per_minute": 9})
    table.add("old", {})
    table.revoke("old")
    with asking(run, admin) as served:
        served.complete()
        served.settle()
        assert served.http.get("/admin/keys").json()["keys"][0]["tokens_today"] == 5
        answer = served.http.get("/admin/keys")
    first, second = answer.json()["keys"]
    assert (first["name"], first["requests_today"], first["requests_per_minute"]) == ("admin", 1, 9)
    assert (second["name"], second["revoked"] > 0, second["last_used"]) == ("old", True, None)
    assert admin not in answer.text


# -- limits -----------------------------------------------------------------------------------------------------------


def test_every_answer_has_openais_headers_and_the_client_gets_its_error(run: RunServer, table: KeyTable) -> None:
    key = table.add("alice", {"requests_per_minute": 3, "tokens_per_minute": 10_000})
    with asking(run, key) as served:
        bad = served.complete(temperature=9)
        assert (bad.status_code, limits(bad.headers)) == (400, ["3", "3", "10000", "10000"])
        whole = served.complete(max_tokens=50)
        reserved = int(whole.request.headers["content-length"]) // 4 + 50
        assert limits(whole.headers) == ["3", "2", "10000", str(10_000 - reserved)]
        served.settle()
        assert used(table) == {"requests": 1, "tokens": 5}
        sdk = served.sdk(key)
        messages: list[Any] = [{"role": "user", "content": "Hi"}]
        raw = sdk.chat.completions.with_raw_response.create(model="org/demo", messages=messages)
        assert limits(raw.headers)[:2] == ["3", "1"]
        with sdk.chat.completions.create(model="org/demo", messages=messages, stream=True) as stream:
            assert limits(stream.response.headers)[:2] == ["3", "0"]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "Hello world"
        with pytest.raises(RateLimitError) as error:
            sdk.chat.completions.create(model="org/demo", messages=messages)
        assert (error.value.code, error.value.type) == ("rate_limit_exceeded", "requests")
        assert 1 <= int(error.value.response.headers["retry-after"]) <= 61
        assert limits(error.value.response.headers)[:2] == ["3", "0"]
        assert not limits(served.http.post("/v1/completions", json={}, headers=bearer("listed")).headers)
    assert used(table) == {"requests": 3, "tokens": 15}


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_other_apis_have_the_same_limits(run: RunServer, table: KeyTable, path: str) -> None:
    messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    body = {"model": "org/demo", **({"input": "Hi"} if path.endswith("responses") else messages)}
    with asking(run, table.add("alice", {"requests_per_day": 1})) as served:
        assert limits(served.post(path, **body).headers) == ["1", "0"]
        refused = served.post(path, **body)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "insufficient_quota")
    assert error["type"] == ("rate_limit_error" if path.endswith("messages") else "insufficient_quota")


@pytest.mark.plugin("responses")
def test_a_response_in_the_background_is_counted_once(run: RunServer, table: KeyTable) -> None:
    with asking(run, table.add("alice", {"requests_per_day": 1})) as served:
        queued = served.post("/v1/responses", input="Hi", background=True)
        assert (queued.status_code, limits(queued.headers)) == (200, ["1", "0"])
        served.settle()
        assert used(table) == {"requests": 1, "tokens": 5}
        assert served.post("/v1/responses", input="Hi", background=True).status_code == 429


def test_whatever_ends_a_request_its_reservation_is_settled(run: RunServer, table: KeyTable) -> None:
    with asking(run, table.add("alice", {"tokens_per_minute": 100_000, "requests_per_minute": 9})) as served:
        served.engine.submit_error = Overloaded("The server is overloaded.")
        assert served.complete(max_tokens=1000).status_code == 429
        served.settle()
        assert used(table) == {"requests": 1, "tokens": 0}
        served.engine.submit_error = None
        served.engine.script = fails(Overloaded("Too many tokens."), "one")
        served.complete(max_tokens=1000, stream=True)
        served.settle()
        assert used(table) == {"requests": 2, "tokens": 4}
        served.engine.script = starts("one")
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
        with served.http.stream("POST", "/v1/chat/completions", json=body) as stream:
            chunks = stream.iter_raw()  # It closes the connection as soon as nothing refers to it.
            next(chunks)
            assert used(table)["tokens"] > 1000  # an answer without max_tokens reserves as many
        served.settle()
        assert used(table) == {"requests": 3, "tokens": 8}
        served.engine.script = says(*"0123456789")
        served.complete(max_tokens=1, n=2)
        served.settle()
        assert used(table) == {"requests": 4, "tokens": 8 + 23}


@pytest.mark.parametrize(("price", "cost"), [(None, 2.5), (0.75, 0.75)])
def test_a_request_costs_its_price_or_else_its_seconds_of_cores(
    run: RunServer, table: KeyTable, price: float | None, cost: float
) -> None:
    with asking(run, table.add("alice", {"cost_per_day": 2 * cost})) as served:
        account = EngineAccount(core_ns=2_500_000_000, price=price)
        served.engine.script = lambda request: [
            [*prompts_done(request), Finished(request.request_id, Usage(3, 0, 0), RequestTimes(), account)]
        ]
        for done in (1, 2):
            assert served.complete(max_tokens=0).status_code == 200
            served.settle()
            assert table.listed()[0]["cost_today"] == done * cost
        assert served.complete().json()["error"]["code"] == "insufficient_quota"


def test_a_key_without_limits_is_counted_and_gets_no_headers(run: RunServer, table: KeyTable) -> None:
    with asking(run, table.add("alice", {})) as served:
        assert not limits(served.complete().headers)
        assert served.complete(temperature=9).status_code == 400
    assert used(table) == {"requests": 1, "tokens": 5}


# -- models and priorities ---------------------------------------------------------------------------------------------


def test_a_key_may_ask_for_its_models_only(run: RunServer, table: KeyTable, tmp_path: Path) -> None:
    key = table.add("alice", {"models": ["cats"]})
    with asking(run, key) as served:
        served.engine.load_adapter("cats", tmp_path)
        assert isinstance(served.engine.adapters.get("cats"), ServedAdapter)
        assert served.complete(model="cats").status_code == 200
        for named in ({}, {"model": "org/demo"}):
            check_refused(served.complete(**named), 403, "model_not_found", "'alice'", "'org/demo'", "'cats'")


def test_a_request_gets_no_better_priority_than_its_key(run: RunServer, table: KeyTable) -> None:
    with asking(run, table.add("alice", {"priority": 5})) as served:
        priorities = []
        for wanted in ({}, {"priority": 1}, {"priority": 9}):
            served.complete(**wanted)
            priorities.append(served.engine.submitted.get().priority)
    assert priorities == [5, 5, 9]


def test_a_request_has_the_share_of_its_key(run: RunServer, table: KeyTable) -> None:
    with asking(run, table.add("alice", {"share": 3.0})) as served:
        served.complete()
        assert served.engine.submitted.get().share == 3.0


def test_metrics_name_clients_only_to_a_key_that_may_watch(run: RunServer, table: KeyTable) -> None:
    keys = {role: table.add(role, {"role": role}) for role in ("use", "watch", "admin")}
    with run() as served:
        named = {
            role: "names clients" in served.http.get("/metrics", headers=bearer(key)).text for role, key in keys.items()
        }
        assert named == {"use": False, "watch": True, "admin": True}
        for headers in ({}, bearer("unknown")):
            answer = served.http.get("/metrics", headers=headers)
            assert (answer.status_code, "names clients" in answer.text) == (200, False)


def test_no_client_learns_another_ones_name(run: RunServer, table: KeyTable) -> None:
    """The server knows that "rival" made alice wait, and answers a request of its. Whatever alice asks for, she gets
    neither its name, nor a text, nor an id."""
    waited = OthersTime(Whose.OTHER_CLIENT, "rival", 271828, 0, 0)
    accounts = [EngineAccount(others_ns={"queue": [waited]}) for _ in range(2)]
    rival = table.add("rival", {})
    watch = table.add("watch", {"role": "watch"})
    key = table.add("alice", {})
    everything = {"x-include-cost": "true", "x-include-reuse": "true", "traceparent": f"00-{1:032x}-{2:016x}-01"}
    texts: list[str] = []
    with asking(run, key) as served, ExitStack() as entered:
        served.telemetry.clients.add(record_at(0, 0, 0, 0, 5, 6, 7, 8, client="alice", account=accounts[0]))
        served.telemetry.recent.add(record_at(0, 0, 0, 0, 5, 6, 7, 8, client="alice", account=accounts[0]))
        served.engine.script = starts("A rival's text")
        body = {"model": "org/demo", "prompt": "A rival's prompt", "stream": True}
        stream = entered.enter_context(served.http.stream("POST", "/v1/completions", json=body, headers=bearer(rival)))
        assert b"A rival's text" in next(stream.iter_raw())
        rivals_id = stream.headers["x-request-id"]
        for path in ("/metrics", "/debug/clients", "/debug/requests"):
            seen = served.http.get(path, headers=bearer(watch)).text
            assert "rival" in seen or path == "/metrics", f"an operator sees it in {path}"
        served.engine.script = says("Hello", account=accounts[1])
        messages = [{"role": "user", "content": "Hi"}]
        for path, body in (
            ("/v1/completions", {"prompt": "Hi"}),
            ("/v1/chat/completions", {"messages": messages}),
            ("/v1/responses", {"input": "Hi"}),
            ("/v1/messages", {"messages": messages, "max_tokens": 16}),
        ):
            if not is_served(path):
                continue
            for stream in ({}, {"stream": True, "stream_options": {"include_usage": True, "include_timings": True}}):
                answer = served.http.post(path, json={"model": "org/demo", **body, **stream}, headers=everything)
                texts += [answer.text, str(answer.headers)]
        for method, path in ALL_ROUTES:
            if method == "GET":
                answer = served.http.get(path)
                texts += [answer.text, str(answer.headers)]
        answer = served.http.get(f"/debug/requests/{rivals_id}")
        texts.append(answer.text.replace(rivals_id, "the id that she asked for"))
    assert any('"others_ns":{"queue":{"other_client":271828}}' in text for text in texts), "she learns how long it was"
    assert not [text for text in texts if "rival" in text or rivals_id in text]


# -- changes and failures ----------------------------------------------------------------------------------------------


def test_a_key_is_made_changed_and_revoked_while_the_server_runs(run: RunServer, table: KeyTable) -> None:
    with run() as served:
        headers = bearer(table.add("alice", {}))
        served.settle(CHANGED_SECONDS)
        assert served.http.get("/v1/models", headers=headers).status_code == 200
        table.change("alice", {"requests_per_day": 1})
        served.settle(CHANGED_SECONDS)
        assert limits(served.http.post("/v1/completions", json={}, headers=headers).headers) == ["1", "1"]
        served.engine.script = starts("Hello")
        body = {"prompt": "Hi", "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            table.revoke("alice")
            served.settle(CHANGED_SECONDS)
            assert served.http.get("/v1/models", headers=headers).status_code == 401
            assert b"Hello" in next(stream.iter_raw())  # what is under way goes on


@pytest.mark.plugin("batches")
def test_lines_of_a_batch_use_the_limits_of_its_key(
    run: RunServer, table: KeyTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line beyond them comes again, unless it is too large for any day."""
    monkeypatch.setattr("oaiserve.plugins.batches.runner.RETRY_SECONDS", 0.01)
    key = table.add("alice", {"requests_per_day": 2, "tokens_per_day": 3000, "priority": 7})
    with asking(run, key) as served:
        sdk = served.sdk(key)
        large = line(3, max_tokens=4000)
        batch = begin(sdk, line(1), large, line(2), line(4))
        served.settle(RETRIED_SECONDS)
        counts = sdk.batches.retrieve(batch.id).request_counts
        assert (counts.completed, counts.failed) == (2, 1)
        assert used(table)["requests"] == 2
        assert served.engine.submitted.get().priority == 7
        table.change("alice", {"requests_per_day": 3})
        served.settle(RETRIED_SECONDS)
        assert sdk.batches.retrieve(batch.id).status == "completed"
    assert used(table) == {"requests": 3, "tokens": 15}


def test_a_table_that_fails_refuses_keys_with_limits_and_counts_the_others_later(
    run: RunServer, table: KeyTable, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited = bearer(table.add("limited", {"requests_per_day": 5}))
    free = bearer(table.add("free", {}))
    with opened_databases() as connections, run() as served:
        opened = connections[str(tmp_path / "store")]
        for connection in opened:
            connection.execute("PRAGMA query_only = ON")  # as if the disk were full
        answer = served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=limited)
        check_refused(answer, 503, "service_unavailable", "limits")
        assert served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=free).status_code == 200
        served.settle()
        assert "The table of keys does not work" in caplog.text
        for connection in opened:
            connection.execute("PRAGMA query_only = OFF")
        served.settle(CHANGED_SECONDS)
        assert sum(key["tokens_today"] for key in table.listed()) == 5
    counts = {key["name"]: key["requests_today"] for key in table.listed()}
    assert counts == {"limited": 0, "free": 1}
