"""All uses of Ray Serve beyond its public API, for which pyproject.toml pins a minor version."""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Any

import ray
from ray import serve
from ray.serve._private.common import REPLICA_ID_FULL_ID_STR_PREFIX
from ray.serve._private.constants import (
    RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S,
    RAY_SERVE_ENABLE_DIRECT_INGRESS,
    SERVE_CONTROLLER_NAME,
    SERVE_NAMESPACE,
)

# Whether replicas have ports of their own, by the environment of this process; and for how long a draining one still
# takes requests, until all gateways know.
HAS_PORTS = bool(RAY_SERVE_ENABLE_DIRECT_INGRESS)
DRAIN_NOTICE_SECONDS = float(RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S)
KEY_SECONDS = 2.0  # in which a replica must say whether it asks for a key


def own_name() -> str:
    """Return the name of this process's replica, as in `targets`."""
    name: str = serve.get_replica_context().replica_id.to_full_id_str()
    return name


def asks_for_keys() -> bool:
    """Return whether a running replica of any application asks for a key."""
    was_connected = ray.is_initialized()
    try:
        if not was_connected:  # as in `serve run`, which connects behind the build
            ray.init("auto", namespace=SERVE_NAMESPACE, logging_level="ERROR", log_to_driver=False)
        found = asyncio.run(targets())
    except (ConnectionError, ValueError):  # there is no Ray, or no Serve
        return False
    finally:
        if not was_connected:
            ray.shutdown()
    return any(_asks_for_key(target.ip, target.port) for target in found)


def _asks_for_key(ip: str, port: int) -> bool:
    with closing(HTTPConnection(ip, port, timeout=KEY_SECONDS)) as connection, suppress(OSError, HTTPException):
        connection.request("GET", "/v1/models")
        return connection.getresponse().status == 401
    return False


async def targets() -> list[Any]:
    """Return the `name`, `ip` and `port` of the present replicas of all applications.

    Where there are none, Ray names its proxy.
    """
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    groups = await controller.get_target_groups.remote()
    named = (target for group in groups for target in group.targets)
    return [target for target in named if target.name.startswith(REPLICA_ID_FULL_ID_STR_PREFIX)]
