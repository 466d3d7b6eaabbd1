"""`Replica` is one server under Ray Serve: the engine, and the app as `oaiserve serve` has it."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oaiserve.app import create_app, response_store, server_telemetry
from oaiserve.config import Config
from oaiserve.engine.engine import Engine
from oaiserve.http.proxies import TrustedProxies
from oaiserve.scale.on_ray import private
from oaiserve.scale.on_ray.edge import Edge
from oaiserve.telemetry import logs

SWITCH_SECONDS = 0.0005  # as in a server without Ray: the engine thread must not wait for Python for long
TARGETS_PATH = "/cluster/targets"

LoadEngine = Callable[[Config], Engine]


def load_engine(config: Config) -> Engine:
    """Return the engine for the settings. This takes as long as the model takes to load."""
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    return Engine.from_pretrained(config.model, config.engine)


class Replica:
    """Ray calls these methods: once the process has started, and for its health."""

    async def __init__(self, config: Config, load: LoadEngine = load_engine) -> None:  # type: ignore[misc]
        self._config = config
        self._log_limit = logs.configure(config.server.log_level, config.server.log_format)
        sys.setswitchinterval(SWITCH_SECONDS)
        # Off the loop, because Ray asks the process for its state while the model loads.
        self._engine = await asyncio.to_thread(load, config)
        gc.collect()
        gc.freeze()

    def __serve_build_asgi_app__(self) -> Edge:
        responses = response_store(self._config.server)
        telemetry = server_telemetry(self._config, self._engine, None, responses, self._log_limit)
        app = create_app(self._config, self._engine, telemetry, responses)
        app.router.routes.append(Route(TARGETS_PATH, list_targets))
        return Edge(TrustedProxies(app, self._config.server.trusted_proxy))

    def check_health(self) -> None:
        """Raise RuntimeError once the engine has failed, so that Ray replaces this replica."""
        failure = self._engine.failure
        if failure is not None:
            raise RuntimeError(f"The engine has stopped ({type(failure).__name__}: {failure}).")


async def list_targets(request: Request) -> Response:
    """Answer with all replicas of this application, as `oaiserve route` and Prometheus' http_sd read them."""
    own = private.own_name().rpartition("#")[0] + "#"
    return JSONResponse(
        [
            {"targets": [f"{target.ip}:{target.port}"], "labels": {"replica": target.name.rpartition("#")[2]}}
            for target in await private.targets()
            if target.name.startswith(own)
        ]
    )
