"""Attacks every route with generated requests: the server never fails, and each refusal is an error object."""

import asyncio

import httpx
import pytest

from tests.nesting import TOO_DEEP
from tests.serving import Served
from tools.attack.attack import Strike
from tools.attack.families import ATTACKS
from tools.attack.families.generated import generate
from tools.attack.verdict import wrong

DEEP = b"[" * TOO_DEEP + b"]" * TOO_DEEP


def send(served: Served, path: str, body: bytes, **headers: str) -> httpx.Response:
    return served.http.post(path, content=body, headers={"content-type": "application/json", **headers})


def check(response: httpx.Response) -> None:
    error = response.json()["error"]
    assert 0 < len(error["message"]) < 1000
    assert error["request_id"] == response.headers["x-request-id"]


def test_no_generated_request_makes_the_server_fail(served_on_a_port: Served) -> None:
    strike = Strike(served_on_a_port.url, quick=False, answer_seconds=30)
    asyncio.run(strike.ask_all(generate(seed=5, number=400), 16))
    (attack,) = (each for each in ATTACKS if each.name == "generated")
    assert len(strike.answers) == 400
    assert [(answer.sent, why) for answer in strike.answers if (why := wrong(attack, answer))] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": ' + DEEP + b"}]}]}"),
        ("/tokenize", b'{"messages": [{"role": "user", "content": [{"type": ' + DEEP + b"}]}]}"),
        ("/v1/completions", b'{"prompt": "Hi", "tools": ' + DEEP + b"}"),
        ("/detokenize", b'{"tokens": [5], "unknown": ' + DEEP + b"}"),
    ],
)
def test_what_is_nested_deeply_is_refused(served: Served, path: str, body: bytes) -> None:
    response = send(served, path, body)
    assert response.status_code == 400
    check(response)


@pytest.mark.parametrize(
    "target", ["/%00", "/%ff%fe", "/v1/models/%2e%2e/%2e%2e", "/v1/models/" + "a" * 5000, "/%F0%9F"]
)
def test_no_path_makes_the_server_fail(served: Served, target: str) -> None:
    response = served.http.request("GET", "/", extensions={"target": target.encode()})
    assert response.status_code == 404
    check(response)


@pytest.mark.parametrize("encoding", ["br", "BR", "gzip, br", "x" * 500])
def test_a_body_in_another_coding_is_refused_with_those_that_are_read(served: Served, encoding: str) -> None:
    response = send(served, "/v1/completions", b"\x1f\x8b\x08", **{"content-encoding": encoding})
    assert response.status_code == 415
    assert encoding.lower().removeprefix("gzip, ")[:80] in response.json()["error"]["message"]
    assert response.headers["accept-encoding"] == "zstd, gzip, deflate"
    check(response)


def test_identity_is_no_compression(served: Served) -> None:
    response = send(served, "/v1/completions", b'{"prompt": "Hi"}', **{"content-encoding": "Identity"})
    assert response.status_code == 200
