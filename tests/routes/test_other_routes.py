"""Tests the routes for models, for the tokenizer, and for operators."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from oaiserve import __version__
from oaiserve.app import create_app
from oaiserve.config import Config, ServerOptions
from tests.routes.conftest import Serve, Served
from tests.routes.doubles import FakeEngine, FakeTelemetry


def test_the_one_model_is_listed(served: Served) -> None:
    (model,) = served.http.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("org/demo", "model", 4096)
    assert isinstance(model["created"], int)


@pytest.mark.parametrize("name", ["org/demo", "org%2Fdemo"])
def test_a_model_with_a_slash_is_found(served: Served, name: str) -> None:
    assert served.http.get(f"/v1/models/{name}").json()["id"] == "org/demo"


def test_the_sdk_lists_and_retrieves_the_model(served: Served) -> None:
    with served.sdk() as client:
        assert [client.models.retrieve(model.id).id for model in client.models.list()] == ["org/demo"]


def test_a_model_may_be_served_under_another_name(serve: Serve) -> None:
    served = serve(served_model_name="mine")
    assert served.complete(model="mine").json()["model"] == "mine"
    assert served.complete(model="org/demo").status_code == 404
    served.telemetry.next_record()
    assert served.telemetry.next_record().model == "mine"


def test_text_and_messages_can_be_tokenized(served: Served) -> None:
    answer = served.post("/tokenize", prompt="ab", return_token_strs=True).json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": ["a", "b"]}
    messages = [{"role": "user", "content": "ab"}]
    answer = served.post("/tokenize", messages=messages, model="org/demo").json()
    assert answer == {"count": 2, "max_model_len": 4096, "tokens": [97, 98], "token_strs": None}


def test_tokens_can_be_detokenized(served: Served) -> None:
    assert served.post("/detokenize", tokens=[97, 98]).json() == {"prompt": "ab"}
    assert served.post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_server_that_can_serve_is_healthy_and_ready(served: Served) -> None:
    for path in ("/health", "/ready"):
        response = served.http.get(path)
        assert (response.status_code, response.content) == (200, b"")


def test_a_server_that_drains_is_healthy_but_not_ready(served: Served) -> None:
    served.engine.is_ready = False
    assert served.http.get("/health").status_code == 200
    response = served.http.get("/ready")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "service_unavailable")


def test_a_server_whose_engine_failed_is_neither_healthy_nor_ready() -> None:
    """The app answers without a server, which would shut down when it notices the failure."""
    engine = FakeEngine()
    engine.failure = RuntimeError("out of memory at 0x123")
    app = create_app(Config("org/demo", ServerOptions()), engine, FakeTelemetry())
    with TestClient(app, base_url="http://localhost") as http:
        responses = [http.get(path) for path in ("/health", "/ready")]
    for response in responses:
        assert response.status_code == 503
        assert "RuntimeError" in response.json()["error"]["message"]


def test_the_version_can_be_read(served: Served) -> None:
    assert served.http.get("/version").json() == {"version": __version__}


def test_metrics_come_in_the_form_that_the_scraper_accepts(served: Served) -> None:
    response = served.http.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert response.text == "# accept: application/openmetrics-text\n"
    assert response.headers["content-type"] == "text/plain; version=0.0.4"


def test_head_is_answered_like_get(served: Served) -> None:
    assert served.http.head("/health").status_code == 200
