"""Our router as Ray's: it follows the replicas that Ray names, learns their reports, and leaves out closed ones."""

from __future__ import annotations

import asyncio
import warnings
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from oaiserve.config import OptionError
from oaiserve.facts.prefix_keys import prompt_of_text
from oaiserve.facts.report import ReplicaReport, Report
from oaiserve.facts.routing_decision import RoutingRequest
from oaiserve.scale.router import NoReplica, Reason, Router

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of Ray itself
    pytest.importorskip("ray.serve", reason="not installed: oaiserve[ray]")

from oaiserve.scale.on_ray.application import build
from oaiserve.scale.on_ray.private import REPORT
from oaiserve.scale.on_ray.replica import Replica
from oaiserve.scale.on_ray.request_router import PrefixRouter


def replica(name: str, *, is_open: bool = True, keys: tuple[int, ...] = ()) -> Any:
    report = ReplicaReport("", f"process of {name}", 1, 0.0, 0.0, array("Q", keys))
    return SimpleNamespace(
        replica_id=SimpleNamespace(to_full_id_str=lambda: name),
        backend_http_endpoint=("127.0.0.1", 1) if is_open else None,
        routing_stats={REPORT: msgspec.msgpack.encode(Report.of(report, is_ready=True, is_hung=False))},
    )


def router_of(replicas: list[Any], monkeypatch: pytest.MonkeyPatch) -> PrefixRouter:
    """Return a router with these replicas, without what Ray's class does of its own."""
    monkeypatch.setattr("ray.serve.request_router.RequestRouter.update_replicas", lambda self, replicas: None)
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    router.update_replicas(replicas)
    return router


def choose(router: PrefixRouter, candidates: list[Any], *args: Any) -> list[list[Any]]:
    request: Any = SimpleNamespace(args=list(args))
    return asyncio.run(router.choose_replicas(candidates, request))


def test_a_prompt_goes_where_a_report_says_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of_text(b"x" * 4096)
    replicas = [replica(name, keys=tuple(prompt.keys) if name == "b" else ()) for name in "abc"]
    asked = RoutingRequest(prompt)
    assert choose(router_of(replicas, monkeypatch), replicas, asked) == [[replicas[1]]]
    assert asked.decision is not None
    assert (asked.decision.replica, asked.decision.reason) == ("b", Reason.PREFIX)
    assert asked.decision.expected_hit_tokens == prompt.num_tokens


def test_a_replica_without_an_open_port_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [replica("a", is_open=False), replica("b")]
    router = router_of(replicas, monkeypatch)
    for number in range(20):
        assert choose(router, replicas, RoutingRequest(prompt_of_text(b"%d" % number))) == [[replicas[1]]]
    with pytest.raises(NoReplica):
        choose(router_of(replicas[:1], monkeypatch), replicas[:1], RoutingRequest(prompt_of_text(b"")))


def test_what_comes_without_a_prompt_goes_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [replica(name) for name in "abc"]
    found = choose(router_of(replicas, monkeypatch), replicas, "something else")
    assert sorted(one.replica_id.to_full_id_str() for (one,) in found) == ["a", "b", "c"]


def test_the_router_is_the_one_of_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(router_of([replica("a")], monkeypatch)._router, Router)


@pytest.mark.parametrize("failure", [None, RuntimeError("no memory")])
def test_a_replica_is_healthy_until_its_engine_has_failed(failure: Exception | None) -> None:
    made = Replica.__new__(Replica)
    made._engine = SimpleNamespace(failure=failure)  # type: ignore[assignment]
    if failure is None:
        made.check_health()
    else:
        with pytest.raises(RuntimeError, match="RuntimeError: no memory"):
            made.check_health()


def test_the_application_has_replicas_and_a_router_where_haproxy_is_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oaiserve.scale.on_ray.private.HAS_HAPROXY", True)
    monkeypatch.setattr("oaiserve.scale.on_ray.private.asks_for_keys", lambda: True)
    with pytest.raises(OptionError, match="this application would answer anybody"):
        build({"model": "demo"})
    build({"model": "demo", "api_key": "a"})
    built = build({"model": "demo", "drain-timeout-seconds": "7", "without_key": "true"})
    assert built._ingress_request_router is not None
    config = built._bound_deployment._deployment_config
    assert config.request_router_config.get_request_router_class().__name__ == "PrefixRouter"
    assert config.graceful_shutdown_timeout_s > 7
    monkeypatch.setattr("oaiserve.scale.on_ray.private.HAS_HAPROXY", False)
    with pytest.raises(OptionError, match="RAY_SERVE_ENABLE_HA_PROXY is not 1"):
        build({"model": "demo"})
