"""`LocalCluster` is a cluster of Ray whose nodes are all this machine, with the settings of deploy/ray/front.env.

Ray reads these settings from the environment when it is imported, so nothing here imports it before they are set.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tools.server_process import ROOT, free_port

FRONT_ENV = ROOT / "deploy" / "ray" / "front.env"
POLL_SECONDS = 0.05
START_LIMIT_SECONDS = 300.0  # three replicas that import PyTorch at once, on a machine with other work
REPLICA = "replica"  # the deployment
OBJECT_STORE_BYTES = 100 * 2**20


class NotInTime(Exception):
    """The cluster was not as it should be in time."""


def front_settings(folder: Path) -> dict[str, str]:
    """Return the settings of the front, with the program of this checkout and ports that are free."""
    lines = FRONT_ENV.read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    program = folder / "oaiserve-haproxy"
    start = "from oaiserve.scale.on_ray.haproxy import main; main()"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{start}' \"$@\"\n")
    program.chmod(0o755)
    return settings | {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(program),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "a.sock"),  # with a node's id, at most 97 characters
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "2",
        # All of Ray starts at once here, on few cores.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONPATH": str(ROOT),
    }


class LocalCluster:
    """The cluster, its front and its replicas. `start_local` makes one."""

    def __init__(self, port: int, folder: Path) -> None:
        self._folder = folder
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
        """Return the ports of the replicas that the front sends requests to, by name."""
        from oaiserve.scale.on_ray import private

        return {target.name: target.port for target in asyncio.run(_awaited(private.targets)) if REPLICA in target.name}

    def pid_of(self, port: int) -> int:
        """Return the process that listens on a port. Raises LookupError if there is none."""
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
                return int(found.pid)
        raise LookupError(f"nothing listens on port {port}")

    def processes(self, title: str) -> list[int]:
        """Return the processes of this machine whose command line has the text."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if title in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def seconds_until(self, holds: Callable[[], bool], limit_seconds: float) -> float | None:
        """Return the seconds until something holds; None if that takes too long."""
        began = time.monotonic()
        while (took := time.monotonic() - began) < limit_seconds:
            with suppress(Exception):  # the controller, the front or a replica may be away
                if holds():
                    return took
            time.sleep(POLL_SECONDS)
        return None

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait until something holds. Raises NotInTime."""
        if self.seconds_until(holds, START_LIMIT_SECONDS) is None:
            raise NotInTime(f"{what} took more than {START_LIMIT_SECONDS:.0f} s")

    def answers(self) -> bool:
        """Return whether the front answers for the replicas."""
        import httpx

        return httpx.get(f"http://127.0.0.1:{self.port}/ready", timeout=2, trust_env=False).status_code == 200


async def _awaited(function: Callable[[], Any]) -> Any:
    return await function()


@contextmanager
def start_local(*, num_cpus: int = 4, nodes: int = 1) -> Iterator[LocalCluster]:
    """Run a head and so many further nodes with so many places for replicas each, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    os.environ.update(front_settings(folder))
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    local = LocalCluster(free_port(), folder)
    try:
        for _ in range(1 + nodes):
            cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR, namespace="oaiserve")
        with suppress(Exception):  # on a busy machine the front is not there in time; `wait_until` waits for it, too
            serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": local.port})
        yield local
    finally:
        ray.shutdown()
        cluster.shutdown()
        for pid in local.processes(str(folder)):  # the front outlives a Ray that ends abruptly
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
