"""`build` makes the application for Ray Serve: the replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from oaiserve.config import Config, OptionError
from oaiserve.scale.on_ray import private
from oaiserve.scale.on_ray.replica import LoadEngine, Replica, load_engine
from oaiserve.scale.on_ray.settings import config_of

HEALTH_SECONDS = 1.0  # between two checks of its health
SILENT_SECONDS = 10.0  # for which a check may wait; after three of these, the replica is replaced
# Ray refuses requests above this with an answer of its own, so it is more than a replica ever has: the engine's 429
# comes first.
MOST_REQUESTS = 100_000
DRAIN_MARGIN_SECONDS = 5


def build(args: Mapping[str, Any], load: LoadEngine = load_engine) -> serve.Application:
    """Return the application for these arguments, the settings of `oaiserve serve`. Raises OptionError.

    The number of replicas and their resources are set in Ray Serve's configuration, under `deployments`, for the
    deployment `replica`. `load` makes the engine of a replica.
    """
    config = config_of(args)
    if not private.HAS_PORTS:
        raise OptionError(
            "RAY_SERVE_ENABLE_DIRECT_INGRESS is not 1, so replicas would have no ports of their own. "
            "deploy/ray/README.md says what to set before Ray is started."
        )
    return serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        ray_actor_options=resources(config),
        max_ongoing_requests=MOST_REQUESTS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=SILENT_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=private.DRAIN_NOTICE_SECONDS
        + config.server.drain_timeout_seconds
        + DRAIN_MARGIN_SECONDS,
        logging_config=LoggingConfig(enable_access_log=False),  # the server has a line for each request
    ).bind(config, load)


def resources(config: Config) -> dict[str, float]:
    """Return Ray's reservation for a replica: a GPU for each shard of the model, or else the cores of --cpu-threads."""
    engine = config.engine
    if engine.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": engine.cpu_threads or 1}
