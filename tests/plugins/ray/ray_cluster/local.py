"""`LocalCluster` is a cluster of Ray whose nodes are all this machine.

Ray reads its settings from the environment when it is imported, so nothing here imports it before they are set.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil

from tools.server_process import ROOT, free_port

POLL_SECONDS = 0.05
START_LIMIT_SECONDS = 300.0  # three replicas that import PyTorch at once, on a machine with other work
REPLICA = "replica"  # the deployment
OBJECT_STORE_BYTES = 100 * 2**20


SETTINGS = {
    "RAY_worker_niceness": "0",  # deploy/ray/README.md has the reason
    # All of Ray starts at once here, on few cores.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONPATH": str(ROOT),
}


class LocalCluster:
    """The cluster, Ray's own proxy at `port`, and replicas. `start_local` makes one."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._headers: dict[str, str] = {}  # with a key

    @property
    def list_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/cluster/targets"

    def deploy(self, num_replicas: int, **settings: Any) -> None:
        """Run so many replicas with these settings, or change those that run: what `serve deploy` does with a file."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {
            "name": "oaiserve",
            "route_prefix": "/",
            "import_path": "oaiserve.plugins.ray:app",
            "args": settings,
            "deployments": [{"name": REPLICA, "num_replicas": num_replicas}],
        }
        if keys := settings.get("api_key"):
            self._headers = {"authorization": f"Bearer {keys}"}
        options = {"host": "0.0.0.0", "port": self.port}
        config = {"proxy_location": "HeadOnly", "http_options": options, "applications": [application]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def replicas(self) -> dict[str, int]:
        """Return the ports of the listed replicas, by name."""
        listed = httpx.get(self.list_url, headers=self._headers, timeout=10, trust_env=False).raise_for_status().json()
        return {one["labels"]["replica"]: int(one["targets"][0].rpartition(":")[2]) for one in listed}

    def pid_of(self, port: int) -> int:
        """Return the process that listens on a port. Raises LookupError if there is none."""
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
                return int(found.pid)
        raise LookupError(f"nothing listens on port {port}")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds. Raises TimeoutError."""
        give_up = time.monotonic() + START_LIMIT_SECONDS
        while time.monotonic() < give_up:
            with suppress(Exception):  # the controller, the proxy or a replica may be away
                if holds():
                    return
            time.sleep(POLL_SECONDS)
        raise TimeoutError(f"{what} took more than {START_LIMIT_SECONDS:.0f} s")


@contextmanager
def start_local(*, num_cpus: int) -> Iterator[LocalCluster]:
    """Run a head and another node, each with `num_cpus` CPUs for replicas, until the end of the block."""
    os.environ.update(SETTINGS)
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    local = LocalCluster(free_port())
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="oaiserve")
        with suppress(Exception):  # on a busy machine the proxy is not there in time; `wait_until` waits for it, too
            serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": local.port})
        yield local
    finally:
        ray.shutdown()
        cluster.shutdown()
