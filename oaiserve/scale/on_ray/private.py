"""All uses of Ray Serve beyond its public API, for which pyproject.toml pins a minor version."""

from __future__ import annotations

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


def own_name() -> str:
    """Return the name of this process's replica, as in `targets`."""
    name: str = serve.get_replica_context().replica_id.to_full_id_str()
    return name


async def targets() -> list[Any]:
    """Return the `name`, `ip` and `port` of the present replicas of all applications.

    Where there are none, Ray names its proxy.
    """
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    groups = await controller.get_target_groups.remote()
    named = (target for group in groups for target in group.targets)
    return [target for target in named if target.name.startswith(REPLICA_ID_FULL_ID_STR_PREFIX)]
