"""Checks replicas on a real cluster of Ray with two nodes, behind the gateway: python -m tests.plugins.ray.on_a_cluster

It is a program of its own, because Ray wants to be imported with its settings in the environment, and warns of
much that pytest would take for errors.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import httpx
import psutil

from tests.plugins.ray.ray_cluster.local import LocalCluster, start_local
from tools.kills import make_model
from tools.server_process import exit_on_sigterm, free_port

REPLICAS = 3
CLIENTS = 8
CALM_SECONDS = 3.0  # before a fault, and after all is there again
KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
SETTINGS: dict[str, Any] = {
    "kv_cache_memory": "64MiB",
    "max_running": 8,
    "max_waiting": 8,
    "api_key": KEY,
    "trusted_proxy": ["0.0.0.0/0"],
}


def client_of(port: int) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=30, trust_env=False)


def check_that_requests_that_begin_alike_meet_and_say_why(cluster: LocalCluster, gateway: httpx.Client) -> None:
    text = "The same long beginning of a prompt. " * 30
    for number in range(4):
        body = {"prompt": f"{text} {number}", "max_tokens": 2}
        headers = {"x-request-id": f"alike-{number}"}
        gateway.post("/v1/completions", json=body, headers=headers).raise_for_status()
    found: dict[str, Any] = {}
    give_up = time.monotonic() + 5
    while len(found) < 4:  # an account is complete a moment after its answer
        assert time.monotonic() < give_up, found
        for port in cluster.replicas().values():
            with client_of(port) as replica:
                for entry in replica.get("/debug/requests?id=alike-").json()["requests"]:
                    found[entry["request_id"]] = entry
    assert len({entry["routing"]["replica"] for entry in found.values()}) == 1, found
    last = found["alike-3"]
    assert last["routing"]["reason"] == "prefix"
    assert last["cached_tokens"] >= last["routing"]["expected_hit_tokens"] > 0


def check_that_all_replicas_are_listed(cluster: LocalCluster) -> None:
    assert len(cluster.replicas()) == REPLICAS
    assert httpx.get(cluster.list_url, trust_env=False).status_code == 401


def num_running(port: int) -> float:
    with client_of(port) as replica:
        return float(re.findall(r"^oaiserve_requests_running (\S+)", replica.get("/metrics").text, re.MULTILINE)[0])


def kill_busiest(cluster: LocalCluster, process_of: Callable[[int], int]) -> None:
    """Kill a process of the replica with the most requests, since nobody notices the end of an idle one, and wait until
    Ray has replaced the replica. `process_of` returns the process by that of the server."""
    replicas = cluster.replicas()
    name = max(replicas, key=lambda name: num_running(replicas[name]))
    server = psutil.Process(cluster.pid_of(replicas[name]))
    os.kill(process_of(server.pid), signal.SIGKILL)
    cluster.wait_until(lambda: name not in cluster.replicas() and len(cluster.replicas()) == REPLICAS, "the repair")
    cluster.wait_until(lambda: not server.is_running(), "the end of the server")


def worker_of(server: int) -> int:
    """Return the process of Ray's worker, which has started a server."""
    return int(psutil.Process(server).ppid())


def check_that_streams_go_on_when_a_replica_is_killed_or_stopped_by_ray(
    cluster: LocalCluster, gateway: httpx.Client, model: str
) -> None:
    is_over = Event()

    def read(client: int) -> list[str]:
        """Read streams one after the other, and return the ends of those that were not whole."""
        broken: list[str] = []
        while not is_over.is_set():
            body = {"prompt": f"{client} {time.monotonic()}", "max_tokens": 40, "ignore_eos": True, "stream": True}
            try:
                text = gateway.post("/v1/completions", json=body).text
            except httpx.HTTPError as error:
                text = repr(error)
            broken += [] if text.endswith("data: [DONE]\n\n") and '"error"' not in text else [text[-200:]]
        return broken

    with ThreadPoolExecutor(CLIENTS) as threads:
        reading = [threads.submit(read, client) for client in range(CLIENTS)]
        try:
            for process_of in (int, worker_of):
                time.sleep(CALM_SECONDS)
                kill_busiest(cluster, process_of)
            cluster.deploy(REPLICAS - 1, model=model, **SETTINGS)
            cluster.wait_until(lambda: len(cluster.replicas()) == REPLICAS - 1, "the change")
            time.sleep(CALM_SECONDS)
        finally:
            is_over.set()
    broken = [end for one in reading for end in one.result()]
    assert not broken, broken[:3]


def main() -> None:
    exit_on_sigterm()
    with TemporaryDirectory() as model, start_local(num_cpus=2) as cluster:
        make_model(Path(model))
        cluster.deploy(REPLICAS, model=model, **SETTINGS)
        cluster.wait_until(lambda: len(cluster.replicas()) == REPLICAS, "the start")
        port = free_port()
        command = [sys.executable, "-m", "oaiserve", "route", "--port", f"{port}", "--replica", cluster.list_url]
        with subprocess.Popen(command, env=os.environ | {"OAISERVE_REPLICA_KEY": KEY}) as process:
            try:
                with client_of(port) as gateway:
                    up = re.compile(r"^oaiserve_gateway_replica_up\{.*\} 1\.0$", re.MULTILINE)
                    cluster.wait_until(
                        lambda: len(up.findall(gateway.get("/metrics").text)) == REPLICAS, "the gateway's start"
                    )
                    check_that_requests_that_begin_alike_meet_and_say_why(cluster, gateway)
                    check_that_all_replicas_are_listed(cluster)
                    check_that_streams_go_on_when_a_replica_is_killed_or_stopped_by_ray(cluster, gateway, model)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
