"""Tests the routes of Ollama's API about models, also those of a server of several models."""

from typing import Any

import pytest

from oaiserve.engine.types.pooling import Pooling
from tests.routes.asking import HYBRID, answered, bearer
from tests.serving import Serve, Served


def listed(served: Served, path: str = "/api/tags") -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = answered(served.http.get(path))["models"]
    return models


def test_models_are_listed_with_tags(serve: Serve) -> None:
    served = serve(served_model_name=("demo", "org/demo:q4"))
    assert [model["name"] for model in listed(served)] == ["demo:latest", "org/demo:q4"]
    first, other = listed(served)
    assert first["model"] == first["name"]
    assert len(first["digest"]) == 64
    assert first["digest"] != other["digest"]
    assert "expires_at" not in first
    (running, _) = listed(served, "/api/ps")
    assert running["context_length"] == 4096
    assert running["expires_at"] > running["modified_at"]


def test_every_listed_name_is_accepted(serve: Serve) -> None:
    served = serve(served_model_name=("demo", "org/demo:q4"))
    for model in listed(served):
        for name in (model["name"], model["name"].removesuffix(":latest")):
            assert answered(served.post("/api/show", model=name))["model_info"]["oaiserve.context_length"] == 4096
            assert answered(served.post("/api/pull", model=name, stream=False)) == {"status": "success"}
            assert served.post("/api/pull", name=name).text == '{"status":"success"}\n'


@pytest.mark.parametrize(
    ("template", "expected"),
    [(None, ["completion"]), (HYBRID, ["completion", "tools", "thinking"])],
)
def test_a_model_says_what_it_can_do(serve: Serve, template: str | None, expected: list[str]) -> None:
    served = serve(template=template)
    served.engine.default_params = {"temperature": 0.7, "repetition_penalty": 1.1}
    shown = answered(served.post("/api/show", model="org/demo"))
    assert shown["capabilities"] == expected
    assert shown["parameters"].splitlines()[0] == "temperature 1.0" or "temperature" in shown["parameters"]
    served.engine.media = frozenset({"image"})
    assert "vision" in answered(served.post("/api/show", model="org/demo"))["capabilities"]
    served.engine.pooling = Pooling("embed", 4)
    assert answered(served.post("/api/show", model="org/demo"))["capabilities"] == ["embedding", "vision"]


def test_unknown_models_are_refused_with_the_names_of_others(served: Served) -> None:
    for path in ("/api/show", "/api/pull"):
        response = served.post(path, model="other:latest")
        assert response.status_code == 404
        assert "This server serves 'org/demo'" in response.json()["error"]
        assert served.post(path).json() == {"error": "Missing required parameter: 'model'."}
    assert "'oaiserve serve MODEL' downloads it" in served.post("/api/pull", model="other").json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "words"),
    [
        ("POST", "create", "This server makes no models"),
        ("POST", "copy", "This server copies no models"),
        ("POST", "push", "This server uploads no models"),
        ("DELETE", "delete", "'oaiserve rm NAME' does"),
    ],
)
def test_models_are_not_changed(served: Served, method: str, path: str, words: str) -> None:
    response = served.http.request(method, f"/api/{path}", json={"model": "org/demo"})
    assert (response.status_code, words in response.json()["error"]) == (404, True)


def test_the_version_is_ollamas_and_the_server_is_named(served: Served) -> None:
    version = answered(served.http.get("/api/version"))
    own = answered(served.http.get("/version"))["version"]
    assert version == {"version": "0.12.11", "server": f"oaiserve {own}"}


def test_keys_hold(serve: Serve) -> None:
    served = serve(api_key=("one",))
    for path in ("tags", "ps", "version"):
        assert served.http.get(f"/api/{path}").status_code == 401
        assert served.http.get(f"/api/{path}", headers=bearer("one")).status_code == 200
