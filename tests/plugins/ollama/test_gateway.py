"""Tests Ollama's API of gateways: of servers, whose streams go on at another one, and of several models."""

from collections.abc import Callable
from concurrent.futures import Future

import httpx
import pytest

from tests.plugins.gateway.doubles import Fleet, Replica, fleet
from tests.plugins.ollama.asking import checked, gathered, lines_of
from tests.world.serving import Place

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 15}}


@pytest.fixture(autouse=True)
def each_step_is_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.engine.event_streams.MAX_CHUNK_TOKENS", 0)


def test_a_gateway_answers_as_its_servers_do(place: Place) -> None:
    with fleet(place, 2) as running:
        for path in ("/api/tags", "/api/ps"):
            (model,) = running.http.get(path).json()["models"]
            assert model["name"] == "m:latest"
        assert running.http.post("/api/show", json={"model": "m"}).json()["capabilities"][0] == "completion"
        assert running.http.get("/api/version").json()["version"]
        answer = running.http.post("/api/chat", json={**BODY, "model": "m:latest", "stream": False})
        assert answer.status_code == 200, answer.text
        assert checked(answer.json())["eval_count"] == 15
        refused = running.http.post("/api/chat", json={**BODY, "model": "other"})
        assert (refused.status_code, isinstance(refused.json()["error"], str)) == (404, True)


def stream(running: Fleet, disturb: Callable[[], None]) -> httpx.Response:
    """Return a stream that is disturbed when its first line has come."""
    asked = running.http.build_request("POST", "/api/chat", json=BODY)
    with running.threads() as threads:
        asking: Future[httpx.Response] = threads.submit(running.http.send, asked, stream=True)
        running.begun()
        for replica in running.replicas.values():
            replica.runner.permit(3)
        answer = asking.result()
        reading = threads.submit(answer.read)
        running.settle(0.1)
        disturb()
        for replica in running.replicas.values():
            replica.runner.permit(1000)
        reading.result()
    return answer


def test_a_stream_whose_server_is_killed_goes_on_with_the_same_lines(place: Place) -> None:
    with fleet(place, 2, gated=True) as running:
        undisturbed = stream(running, lambda: None)
    with fleet(place, 2, gated=True) as running:
        continued = stream(running, lambda: busy_of(running).server.kill())
        assert running.metric("oaiserve_gateway_continued_total", result="alike") == 1
    texts = [
        gathered([line for line in lines_of(answer) if line["message"]["content"] or line["done"]])["message"]
        for answer in (undisturbed, continued)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0]["content"]) == 15


def test_a_stream_that_no_server_continues_ends_with_an_error(place: Place) -> None:
    with fleet(place, 1, gated=True, continues="never") as running:
        answer = stream(running, lambda: busy_of(running).server.kill())
        *_, last = lines_of(answer)
        assert [*last] == ["error"]
        assert "has ended" in last["error"]


def busy_of(running: Fleet) -> Replica:
    return max(running.replicas.values(), key=lambda replica: len(replica.runner.steps))
