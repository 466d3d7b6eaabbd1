"""`LocalCluster` is a cluster of Ray whose nodes are all this machine, with the settings of deploy/ray/ray.env.

Ray reads these settings from the environment when it is imported, so nothing here imports it before they are set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from tools.server_process import ROOT, free_port

RAY_ENV = ROOT / "deploy" / "ray" / "ray.env"
POLL_SECONDS = 0.05
START_LIMIT_SECONDS = 300.0  # three replicas that import PyTorch at once, on a machine with other work
REPLICA = "replica"  # the deployment
OBJECT_STORE_BYTES = 100 * 2**20


def settings() -> dict[str, str]:
    """Return the settings of each node, with this checkout."""
    lines = RAY_ENV.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#")) | {
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

    def deploy(self, num_replicas: int, *, step_ms: float = 10, **settings: Any) -> None:
        """Run so many replicas with these settings, or change those that run: what `serve deploy` does with a file."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        application = {
            "name": "oaiserve",
            "route_prefix": "/",
            "import_path": "tests.scale.ray_cluster.application:app",
            "args": {"step_ms": step_ms, **settings},
            "deployments": [{"name": REPLICA, "num_replicas": num_replicas}],
        }
        options = {"host": "0.0.0.0", "port": self.port}  # replicas listen there, too, and are named by their node
        config = {"proxy_location": "HeadOnly", "http_options": options, "applications": [application]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def replicas(self) -> dict[str, int]:
        """Return the ports of the replicas that Ray lists, by name."""
        from oaiserve.scale.on_ray import private

        return {target.name: target.port for target in asyncio.run(_awaited(private.targets)) if REPLICA in target.name}

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


async def _awaited(function: Callable[[], Any]) -> Any:
    return await function()


@contextmanager
def start_local(*, num_cpus: int) -> Iterator[LocalCluster]:
    """Run a head and one more node with so many places for replicas each, until the end of the block."""
    os.environ.update(settings())
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
