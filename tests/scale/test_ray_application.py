"""The application for Ray: what it refuses, what it asks Ray for, and when a replica is healthy."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest

from oaiserve.config import OptionError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray itself
    pytest.importorskip("ray.serve", reason="not installed: oaiserve[ray]")

from oaiserve.scale.on_ray.application import build
from oaiserve.scale.on_ray.replica import Replica


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
