"""The list of replicas under Ray, which gateways and Prometheus read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from oaiserve.config import Config, ServerOptions
from oaiserve.plugins.ray.targets import GONE_SECONDS, REPORT_SECONDS, Targets

HEADERS = {"authorization": "Bearer mine"}
PATH = "/cluster/targets"


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def targets(clock: Clock) -> Targets:
    return Targets(Config("demo", ServerOptions(host="0.0.0.0", api_key=("mine",))), None, clock)


@pytest.fixture
def client(targets: Targets) -> Iterator[TestClient]:
    async def answer(request: Request) -> Response:
        return await targets(request)

    with TestClient(Starlette(routes=[Route("/{path:path}", answer)])) as client:
        yield client


@pytest.fixture
def listed(client: TestClient) -> Callable[[], list[str]]:
    def listed() -> list[str]:
        return [one["targets"][0] for one in client.get(PATH, headers=HEADERS).raise_for_status().json()]

    return listed


def test_list_has_the_replicas_that_report(targets: Targets, clock: Clock, listed: Callable[[], list[str]]) -> None:
    clock.seconds = GONE_SECONDS
    for name in ("a", "b", "c"):
        targets.add(name, f"10.0.0.{ord(name)}:30000")
    targets.remove("b")
    assert listed() == ["10.0.0.97:30000", "10.0.0.99:30000"]
    clock.seconds = 1.5 * GONE_SECONDS
    targets.add("c", "10.0.0.99:30000")
    clock.seconds = 2 * GONE_SECONDS + 1
    assert listed() == ["10.0.0.99:30000"]


def test_list_needs_a_key_and_nothing_else_is_there(client: TestClient, clock: Clock) -> None:
    clock.seconds = GONE_SECONDS
    assert client.get(PATH).status_code == 401
    assert client.get("/v1/models").status_code == 404


def test_there_is_no_list_until_all_replicas_could_report(
    targets: Targets, client: TestClient, clock: Clock, listed: Callable[[], list[str]]
) -> None:
    # Ray has started the list again. One replica reports at once, another one a moment later.
    clock.seconds = REPORT_SECONDS
    targets.add("a", "10.0.0.97:30000")
    early = client.get(PATH, headers=HEADERS)
    assert (early.status_code, early.headers["retry-after"]) == (503, "10")
    assert "may not be complete" in early.json()["error"]["message"]
    targets.add("b", "10.0.0.98:30000")
    clock.seconds = GONE_SECONDS
    assert listed() == ["10.0.0.97:30000", "10.0.0.98:30000"]
