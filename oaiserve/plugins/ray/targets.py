"""`Targets` lists the replicas in the form that `oaiserve route` and Prometheus' http_sd read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oaiserve.config import Config
from oaiserve.plugin_loading import keyring, own_plugins
from oaiserve.routes.door.access import key_in

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

DEPLOYMENT = "targets"
PATH = "/cluster/targets"
REPORT_SECONDS = 1.0  # time between two reports of a replica
# After this time without a report, a replica is not listed. Before this time has passed, there is no list.
GONE_SECONDS = 10.0


class Targets:
    """Ray calls `__call__` for requests through its proxy, and replicas call `add` and `remove`."""

    def __init__(
        self,
        config: Config,
        replicas: DeploymentHandle | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """If the server has keys, the list needs one. The handle makes the replicas a part of the application."""
        self._ring = keyring(own_plugins(), config)
        self._clock = clock
        self._started = clock()
        self._replicas: dict[str, tuple[str, float]] = {}  # keyed by name: address and time of the last report

    def add(self, name: str, address: str) -> None:
        self._replicas[name] = address, self._clock()

    def remove(self, name: str) -> None:
        self._replicas.pop(name, None)

    async def __call__(self, request: Request) -> Response:
        if request.url.path != PATH:
            message = f"Only {PATH} is here. For everything else, ask the gateway (oaiserve route)."
            return JSONResponse({"error": {"message": message}}, 404)
        if self._ring is not None and self._ring.find(key_in(request.headers)) is None:
            return JSONResponse({"error": {"message": "The list of replicas needs an API key."}}, 401)
        since = self._clock() - GONE_SECONDS
        if self._started > since:
            # Ray has started this list again, perhaps after a partition. Gateways would drop replicas that have not
            # reported yet, but without a list they keep all that they know.
            message = f"The list of replicas began less than {GONE_SECONDS:.0f} seconds ago, and may not be complete."
            return JSONResponse({"error": {"message": message}}, 503, {"retry-after": f"{GONE_SECONDS:.0f}"})
        self._replicas = {name: one for name, one in self._replicas.items() if one[1] >= since}
        listed = sorted(self._replicas.items())
        return JSONResponse([{"targets": [address], "labels": {"replica": name}} for name, (address, _) in listed])
