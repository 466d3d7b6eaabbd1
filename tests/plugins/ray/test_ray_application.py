"""The application for Ray: what it asks Ray for, its list of replicas, their health, and a real cluster."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from oaiserve.config import ServerOptions

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray itself
    pytest.importorskip("ray.serve", reason="not installed: oaiserve[ray]")

from oaiserve.plugins.ray.application import build
from oaiserve.plugins.ray.replica import Replica
from oaiserve.plugins.ray.scaling import desired_replicas
from oaiserve.plugins.ray.targets import GONE_SECONDS, Targets
from oaiserve.wire.upstream import Unreachable
from tests.deploy.paths import ROOT


class Server:
    """A double of the connections to a server."""

    def __init__(self, status: int = 200, content: bytes = b"") -> None:
        self._answer = status, content

    async def get(self, path: bytes, headers: object, most_bytes: int = 0) -> tuple[int, bytes]:
        if not self._answer[0]:
            raise Unreachable("nobody listens")
        return self._answer


@pytest.fixture(autouse=True)
def _never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Ray ends a replica: Python would call its coroutine function, too, and nobody would await it."""
    monkeypatch.delattr(Replica, "__del__")


def replica(server: Server, *, has_ended: bool = False) -> Replica:
    made: Any = Replica.__new__(Replica)
    made._process = SimpleNamespace(has_ended=has_ended, how_ended="by SIGKILL")
    made._upstream = server
    made._headers = []
    return made


@pytest.mark.parametrize(
    ("status", "has_ended", "problem"),
    [
        (200, False, ""),
        (200, True, "The server has ended by SIGKILL"),
        (503, False, "/health returns 503"),
        (0, False, "does not answer: nobody listens"),
    ],
)
async def test_replica_is_healthy_as_long_as_its_server_is(status: int, has_ended: bool, problem: str) -> None:
    made = replica(Server(status), has_ended=has_ended)
    if not problem:
        await made.check_health()
    else:
        with pytest.raises(RuntimeError, match=problem):
            await made.check_health()


async def test_replicas_report_open_requests_by_which_ray_scales() -> None:
    metrics = b"# TYPE x gauge\noaiserve_requests_running 3.0\noaiserve_requests_waiting 4.0\nother 9.0\n"
    assert await replica(Server(content=metrics)).record_autoscaling_stats() == {"open_requests": 7.0}
    context: Any = SimpleNamespace(
        aggregated_metrics={"open_requests": {"a": 7.0, "b": 5.0}},
        config=SimpleNamespace(target_ongoing_requests=4),
        target_num_replicas=2,
    )
    assert desired_replicas(context) == (3.0, {})
    context.aggregated_metrics = {}
    assert desired_replicas(context) == (2, {})


def test_list_has_the_replicas_that_report_and_needs_a_key() -> None:
    now = 0.0
    targets = Targets(ServerOptions(host="0.0.0.0", api_key=("mine",)), None, lambda: now)

    async def answer(request: Request) -> Response:
        return await targets(request)

    with TestClient(Starlette(routes=[Route("/{path:path}", answer)])) as client:

        def listed() -> list[str]:
            answer = client.get("/cluster/targets", headers={"authorization": "Bearer mine"})
            return [one["targets"][0] for one in answer.json()]

        for name in ("a", "b", "c"):
            targets.add(name, f"10.0.0.{ord(name)}:30000")
        targets.remove("b")
        assert listed() == ["10.0.0.97:30000", "10.0.0.99:30000"]
        now = GONE_SECONDS / 2
        targets.add("c", "10.0.0.99:30000")
        now = GONE_SECONDS + 1
        assert listed() == ["10.0.0.99:30000"]
        assert client.get("/cluster/targets").status_code == 401
        assert client.get("/v1/models").status_code == 404


def test_replica_has_its_drain_timeout_before_ray_kills_it() -> None:
    built = build({"model": "demo", "drain-timeout-seconds": "7"})
    assert built._bound_deployment.name == "targets"
    (_, replicas) = built._bound_deployment.init_args
    assert replicas._bound_deployment._deployment_config.graceful_shutdown_timeout_s > 7


def test_replicas_serve_and_survive_on_a_cluster() -> None:
    """`on_a_cluster.py` has the checks, on two nodes."""
    command = [sys.executable, "-m", "tests.plugins.ray.on_a_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
