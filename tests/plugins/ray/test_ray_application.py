"""The application for Ray: what it asks Ray for, the health of replicas, and a real cluster."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from oaiserve.commands.client import NoAnswer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray itself
    pytest.importorskip("ray.serve", reason="not installed: oaiserve[ray]")

from oaiserve.plugins.ray.application import build
from oaiserve.plugins.ray.replica import Replica
from oaiserve.plugins.ray.scaling import desired_replicas
from tests.deploy.paths import ROOT


class Server:
    """A double of the client of a server."""

    def __init__(self, content: str = "", refusal: str = "") -> None:
        self._content = content
        self._refusal = refusal

    def text(self, path: str, *, seconds: float) -> str:
        if self._refusal:
            raise NoAnswer(self._refusal)
        return self._content


@pytest.fixture(autouse=True)
def _never_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Ray ends a replica: Python would call its coroutine function, too, and nobody would await it."""
    monkeypatch.delattr(Replica, "__del__")


def replica(server: Server, *, has_ended: bool = False) -> Replica:
    made: Any = Replica.__new__(Replica)
    made._process = SimpleNamespace(has_ended=has_ended, how_ended="by SIGKILL")
    made._client = server
    return made


@pytest.mark.parametrize(
    ("refusal", "has_ended", "problem"),
    [
        ("", False, ""),
        ("", True, "The server has ended by SIGKILL"),
        ("http://127.0.0.1:30000 answers 503.", False, "The server is not healthy: .* answers 503"),
    ],
)
async def test_replica_is_healthy_as_long_as_its_server_is(refusal: str, has_ended: bool, problem: str) -> None:
    made = replica(Server(refusal=refusal), has_ended=has_ended)
    if not problem:
        await made.check_health()
    else:
        with pytest.raises(RuntimeError, match=problem):
            await made.check_health()


async def test_replicas_report_open_requests_by_which_ray_scales() -> None:
    metrics = "# TYPE x gauge\noaiserve_requests_running 3.0\noaiserve_requests_waiting 4.0\nother 9.0\n"
    assert await replica(Server(content=metrics)).record_autoscaling_stats() == {"open_requests": 7.0}
    context: Any = SimpleNamespace(
        aggregated_metrics={"open_requests": {"a": 7.0, "b": 5.0}},
        config=SimpleNamespace(target_ongoing_requests=4),
        target_num_replicas=2,
    )
    assert desired_replicas(context) == (3.0, {})
    context.aggregated_metrics = {}
    assert desired_replicas(context) == (2, {})


def test_replica_has_its_drain_timeout_before_ray_kills_it() -> None:
    built = build({"model": "demo", "drain-timeout-seconds": "7"})
    assert built._bound_deployment.name == "targets"
    (_, replicas) = built._bound_deployment.init_args
    assert replicas._bound_deployment._deployment_config.graceful_shutdown_timeout_s > 7


def test_replicas_serve_and_survive_on_a_cluster() -> None:
    """`on_a_cluster.py` has the checks, on two nodes."""
    command = [sys.executable, "-m", "tests.plugins.ray.on_a_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
