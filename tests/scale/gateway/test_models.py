"""Servers with different models behind one gateway: each request goes to one that has its model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.scale.gateway.doubles import SIGNATURE, Fleet, fleet
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def two_models() -> Iterator[Fleet]:
    """Two servers of a model "m", and one of "other"."""
    with fleet(2) as running:
        running.add(model="other")
        running.wait_until_known()
        wait_until(lambda: running.gateway._router.differ)
        yield running


def test_a_request_goes_to_a_server_with_its_model(two_models: Fleet) -> None:
    other = [*two_models.replicas][2]
    for number in range(8):
        for model, is_other in (("m", False), ("other", True)):
            answer = two_models.ask(f"{number}", body={"model": model})
            assert answer.status_code == 200
            assert answer.json()["model"] == model
            assert (answer.headers[SIGNATURE] == other) == is_other


def test_a_model_that_none_has_is_refused_by_a_server(two_models: Fleet) -> None:
    answer = two_models.ask("Hello", body={"model": "none"})
    assert answer.status_code == 404
    assert "'none' does not exist" in answer.json()["error"]["message"]


def test_the_list_has_all_models_once(two_models: Fleet) -> None:
    listed = two_models.http.get("/v1/models").json()
    assert sorted(model["id"] for model in listed["data"]) == ["m", "other"]
    for name in ("m", "other"):
        assert two_models.http.get(f"/v1/models/{name}").json()["id"] == name


def test_a_stored_response_is_found_at_the_server_that_has_it(two_models: Fleet) -> None:
    made = two_models.http.post("/v1/responses", json={"model": "other", "input": "Hello", "max_output_tokens": 16})
    assert made.status_code == 200, made.text
    path = f"/v1/responses/{made.json()['id']}"
    assert all(two_models.http.get(path).json()["id"] == made.json()["id"] for _ in range(3))
    assert two_models.http.delete(path).status_code == 200
    assert two_models.http.get(path).status_code == 404
