"""`Replica` runs one server under Ray Serve: it starts a child process, and ends with it."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from dataclasses import replace
from secrets import token_urlsafe

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from oaiserve.commands.client import Client, NoAnswer
from oaiserve.commands.server_process import ServerProcess
from oaiserve.config import Config
from oaiserve.errors import StartupError
from oaiserve.plugins.ray.targets import DEPLOYMENT, REPORT_SECONDS

log = logging.getLogger(__name__)

PORTS = range(30000, 31001)
REPORT_LIMIT_SECONDS = 5.0  # time limit for a report to the list of replicas
ANSWER_LIMIT_SECONDS = 20.0  # time limit for the server's health and load; Ray waits 30 seconds for them
_OPEN = re.compile(r"^oaiserve_requests_(?:running|waiting) (\S+)", re.MULTILINE)


class Replica:
    """Ray calls these methods when its worker has started, to check its health and load, and to end it."""

    async def __init__(self, config: Config) -> None:  # type: ignore[misc]
        server = config.server
        listening = _listening(server.host)
        port = listening.getsockname()[1]
        self._client = Client(f"http://127.0.0.1:{port}")
        if config.needs_key:
            self._client.key = token_urlsafe()
            config = replace(config, server=replace(server, api_key=(*server.api_key, self._client.key)))
        self._drain_seconds = server.drain_timeout_seconds
        self._process = await ServerProcess.start(config, listening)
        await self._process.ready()
        context = serve.get_replica_context()
        self._name = context.replica_tag
        self._targets = serve.get_deployment_handle(DEPLOYMENT, context.app_name)
        self._reporting = asyncio.create_task(self._report(f"{ray.util.get_node_ip_address()}:{port}"))

    async def _report(self, address: str) -> None:
        """Report regularly to the list of replicas that this one is alive, until it is cancelled."""
        while True:
            try:
                async with asyncio.timeout(REPORT_LIMIT_SECONDS):
                    await self._targets.add.remote(self._name, address)
            except (TimeoutError, RayError, RayServeException) as error:  # The list may be unavailable for a while.
                log.info("The list of replicas takes no report: %s", error)
            await asyncio.sleep(REPORT_SECONDS)

    async def check_health(self) -> None:
        """Raise RuntimeError, upon which Ray replaces the replica, if the server has ended, or its engine hangs or has
        failed."""
        if self._process.has_ended:
            raise RuntimeError(f"The server has ended {self._process.how_ended}.")
        try:
            await self._text("/health")
        except NoAnswer as error:
            raise RuntimeError(f"The server is not healthy: {error}") from None

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of open requests, which `scaling` reads. Ray's own count misses them."""
        return {"open_requests": sum(float(number) for number in _OPEN.findall(await self._text("/metrics")))}

    async def _text(self, path: str) -> str:
        return await asyncio.to_thread(self._client.text, path, seconds=ANSWER_LIMIT_SECONDS)

    async def __del__(self) -> None:
        """End the server, whose requests have the drain timeout to finish."""
        if not hasattr(self, "_reporting"):  # It has not started.
            return
        self._reporting.cancel()
        try:
            async with asyncio.timeout(REPORT_LIMIT_SECONDS):
                await self._targets.remove.remote(self._name)
        except (TimeoutError, RayError, RayServeException) as error:
            log.info("The list of replicas still has this one: %s", error)
        await self._process.end(self._drain_seconds)


def _listening(host: str) -> socket.socket:
    """Return a socket that is bound to a free port. Raises StartupError."""
    for port in PORTS:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            listening.bind((host, port))
            return listening
        except OSError:  # Another replica has this port.
            listening.close()
    raise StartupError(f"No port from {PORTS[0]} to {PORTS[-1]} is free.")
