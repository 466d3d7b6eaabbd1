"""The application for Ray: what it refuses, what it asks Ray for, when a replica is healthy, and a real cluster."""

from __future__ import annotations

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from oaiserve.config import OptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray itself
    pytest.importorskip("ray.serve", reason="not installed: oaiserve[ray]")

from oaiserve.scale.on_ray.application import build
from oaiserve.scale.on_ray.replica import Replica
from tests.deploy.paths import ROOT


@pytest.mark.parametrize("failure", [None, RuntimeError("no memory")])
def test_a_replica_is_healthy_until_its_engine_has_failed(failure: Exception | None) -> None:
    made = Replica.__new__(Replica)
    made._engine = SimpleNamespace(failure=failure)  # type: ignore[assignment]
    if failure is None:
        made.check_health()
    else:
        with pytest.raises(RuntimeError, match="RuntimeError: no memory"):
            made.check_health()


def test_the_application_needs_ports_for_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.scale.on_ray.private.HAS_PORTS", True)
    built = build({"model": "demo", "drain-timeout-seconds": "7"})
    assert built._bound_deployment._deployment_config.graceful_shutdown_timeout_s > 7
    monkeypatch.setattr("oaiserve.scale.on_ray.private.HAS_PORTS", False)
    with pytest.raises(OptionError, match="RAY_SERVE_ENABLE_DIRECT_INGRESS is not 1"):
        build({"model": "demo"})


def test_replicas_serve_and_survive_on_a_cluster() -> None:
    """`on_a_cluster.py` has the checks, on two nodes."""
    command = [sys.executable, "-m", "tests.scale.on_a_cluster"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
