"""The front of several models: what it shows to whom, without a process behind it."""

from pathlib import Path

import pytest
from starlette.testclient import TestClient

from oaiserve.config import Config, ModelsOptions, ServerOptions
from oaiserve.http.key_table import KeyTable
from oaiserve.scale.children.settings import models_of
from oaiserve.scale.gateway.app import create_gateway_of_models

INSIDE = (
    *("/dashboard", "/requests", "/requests/x", "/dashboard/feed", "/debug/requests", "/debug/requests/x"),
    *("/debug/report", "/debug//report", "/%2fdebug/report", "/debug/requests?model=demo"),
)


def front(server: ServerOptions) -> TestClient:
    configs = models_of(["demo"], {}, Config("models", server))
    app, _, _ = create_gateway_of_models(server, configs, ModelsOptions(load_on_demand=True))
    return TestClient(app, base_url="http://127.0.0.1", headers={"host": "127.0.0.1"}, raise_server_exceptions=False)


@pytest.mark.parametrize("path", INSIDE)
def test_a_public_front_without_keys_shows_nobody_the_inside(path: str) -> None:
    with front(ServerOptions(host="0.0.0.0")) as client:
        answer = client.get(path)
    assert answer.status_code == 404
    assert "shows other people's requests" in answer.json()["error"]["message"]


def test_a_front_with_keys_asks_for_one() -> None:
    with front(ServerOptions(host="0.0.0.0", api_key=("mine",))) as client:
        for path in ("/v1/models", *INSIDE[3:]):
            assert client.get(path).status_code == 401, path
        listed = client.get("/v1/models", headers={"authorization": "Bearer mine"})
        assert [(model["id"], model["is_loaded"]) for model in listed.json()["data"]] == [("demo", False)]
        assert client.get("/v1/models/none", headers={"authorization": "Bearer mine"}).status_code == 404


def test_a_front_of_one_model_lists_each_of_its_names() -> None:
    with front(ServerOptions(served_model_name=("mine", "gpt-4o"))) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(model["id"], model["is_loaded"]) for model in listed] == [("mine", False), ("gpt-4o", False)]
        assert client.get("/v1/models/gpt-4o").json()["root"] == listed[0]["root"]


def test_the_front_knows_stored_keys_and_refuses_a_model_before_it_is_loaded(tmp_path: Path) -> None:
    server = ServerOptions(stored_keys=True, response_store=tmp_path / "store")
    table = KeyTable(tmp_path / "store")
    admin, alice = (
        {"authorization": f"Bearer {table.add(name, values)}"}
        for name, values in (("admin", {"role": "admin"}), ("alice", {"models": ["other"]}))
    )
    with front(server) as client:
        answer = client.post("/v1/completions", json={"model": "demo", "prompt": "Hello"}, headers=alice)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_found")
        assert not client.get("/v1/models", headers=alice).json()["data"][0]["is_loaded"]
        assert {client.get(path, headers=alice).status_code for path in ("/admin/keys", "/debug/requests")} == {403}
        assert [key["name"] for key in client.get("/admin/keys", headers=admin).json()["keys"]] == ["admin", "alice"]


def test_a_model_that_no_process_has_is_told_to_be_unknown() -> None:
    with front(ServerOptions()) as client:
        answer = client.post("/v1/completions", json={"model": "other", "prompt": "Hello"})
    assert answer.status_code == 404
    assert "'other' does not exist. This server serves 'demo'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", ["../two", "%00", "%ff", "ü", "a" * 5000])
def test_requests_of_an_unknown_model_are_not_found(name: str) -> None:
    with front(ServerOptions()) as client:
        answer = client.get(f"/debug/requests?model={name}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_a_server_of_several_models_says_that_it_has_no_batches() -> None:
    asked = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}
    with front(ServerOptions()) as client:
        answer = client.post("/v1/batches", json=asked)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "has no batches" in answer.json()["error"]["message"]
