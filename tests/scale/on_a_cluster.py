"""Checks replicas on a real cluster of Ray with two nodes, behind the gateway: python -m tests.scale.on_a_cluster

It is a program of its own, because Ray wants to be imported with its settings in the environment, and warns of
much that pytest would take for errors. Each check is a function below, and raises AssertionError.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.scale.ray_cluster.clients import KEY, Clients, End
from tests.scale.ray_cluster.local import LocalCluster, start_local
from tools.server_process import exit_on_sigterm, free_port

REPLICAS = 3
CALM_SECONDS = 3.0  # before a fault, and after all is there again


@dataclass(frozen=True, slots=True)
class Served:
    """The cluster, and the port of the gateway in front of it."""

    cluster: LocalCluster
    port: int

    def post(self, body: dict[str, object], **headers: str) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        named = {name.replace("_", "-"): value for name, value in headers.items()} | {"authorization": f"Bearer {KEY}"}
        return httpx.post(url, json=body, headers=named, timeout=30, trust_env=False)


def get(path: str, port: int) -> httpx.Response:
    url = f"http://127.0.0.1:{port}{path}"
    return httpx.get(url, headers={"authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False)


def requests_that_begin_alike_meet_and_say_why(served: Served) -> None:
    text = "The same long beginning of a prompt. " * 60
    for number in range(4):
        served.post({"prompt": f"{text} {number}", "max_tokens": 2}, x_request_id=f"alike-{number}")
    found: dict[str, Any] = {}
    give_up = time.monotonic() + 5
    while len(found) < 4:  # an account is complete a moment after its answer
        assert time.monotonic() < give_up, found
        for port in served.cluster.replicas().values():
            for entry in get("/debug/requests?id=alike-", port).json()["requests"]:
                found[entry["request_id"]] = entry
    assert len({entry["routing"]["replica"] for entry in found.values()}) == 1, found
    last = found["alike-3"]
    assert last["routing"]["reason"] == "prefix"
    assert last["cached_tokens"] >= last["routing"]["expected_hit_tokens"] > 0


def all_replicas_are_listed(served: Served) -> None:
    listed = get("/cluster/targets", served.cluster.port).json()
    ports = sorted(int(one["targets"][0].rpartition(":")[2]) for one in listed)
    assert ports == sorted(served.cluster.replicas().values())
    assert all(one["labels"]["replica"] for one in listed)


RUNNING = r"^(oaiserve_requests_running) (\S+)"


def streams_go_on_when_a_replica_is_killed_or_stopped_by_ray(served: Served) -> None:
    cluster, clients = served.cluster, Clients(served.port)
    clients.start()
    time.sleep(CALM_SECONDS)
    metrics = {name: get("/metrics", port).text for name, port in cluster.replicas().items()}
    # Of an idle one, clients would see nothing.
    name = max(metrics, key=lambda name: float(re.findall(RUNNING, metrics[name], re.MULTILINE)[0][1]))
    os.kill(cluster.pid_of(cluster.replicas()[name]), signal.SIGKILL)
    cluster.wait_until(lambda: name not in cluster.replicas() and len(cluster.replicas()) == REPLICAS, "the repair")
    cluster.deploy(REPLICAS - 1, **SETTINGS)
    cluster.wait_until(lambda: len(cluster.replicas()) == REPLICAS - 1, "the change")
    time.sleep(CALM_SECONDS)
    ends = Counter(answer.end for answer in clients.stop())
    assert ends.keys() == {End.WHOLE}, ends


SETTINGS: dict[str, Any] = {
    "step_ms": 5,
    "max_running": 8,
    "max_waiting": 8,
    "api_key": KEY,
    "trusted_proxy": ["0.0.0.0/0"],
}
CHECKS: tuple[Callable[[Served], None], ...] = (
    requests_that_begin_alike_meet_and_say_why,
    all_replicas_are_listed,
    streams_go_on_when_a_replica_is_killed_or_stopped_by_ray,
)


def main() -> None:
    exit_on_sigterm()
    failed = False
    with start_local(num_cpus=2) as cluster:
        cluster.deploy(REPLICAS, **SETTINGS)
        cluster.wait_until(lambda: len(cluster.replicas()) == REPLICAS, "the start")
        port, listed = free_port(), f"http://127.0.0.1:{cluster.port}/cluster/targets"
        command = [sys.executable, "-m", "oaiserve", "route", "--port", f"{port}", "--replica", listed]
        with subprocess.Popen(command, env=os.environ | {"OAISERVE_REPLICA_KEY": KEY}) as gateway:
            try:
                metrics = f"http://127.0.0.1:{port}/metrics"
                cluster.wait_until(
                    lambda: httpx.get(metrics).text.count("replica_up{") == REPLICAS, "the gateway's start"
                )
                for check in CHECKS:
                    began = time.monotonic()
                    try:
                        check(Served(cluster, port))
                    except Exception:
                        failed = True
                        traceback.print_exc()
                    print(f"{check.__name__}: {time.monotonic() - began:.1f} s", flush=True)
            finally:
                gateway.terminate()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
