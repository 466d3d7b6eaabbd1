"""`build` makes the application for Ray Serve: the replicas, and the list of their addresses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.schema import LoggingConfig

from oaiserve.commands.server_process import GOODBYE_SECONDS
from oaiserve.config import Config
from oaiserve.plugins.ray.replica import REPORT_LIMIT_SECONDS, Replica
from oaiserve.plugins.ray.settings import config_of
from oaiserve.plugins.ray.targets import DEPLOYMENT, Targets

HEALTH_SECONDS = 1.0  # between two checks of its health
SILENT_SECONDS = 10.0  # longest wait of a check; after three of these, the replica is replaced
DRAIN_MARGIN_SECONDS = REPORT_LIMIT_SECONDS + GOODBYE_SECONDS  # time for what a replica does besides draining


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for these arguments, the settings of `oaiserve serve`. Raises OptionError.

    The number of replicas and their resources are set in Ray Serve's configuration, under `deployments`, for the
    deployment `replica`.
    """
    config = config_of(args)
    replica = serve.deployment(
        Replica,
        name="replica",
        ray_actor_options=resources(config),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=SILENT_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=config.server.drain_timeout_seconds + DRAIN_MARGIN_SECONDS,
    )
    targets = serve.deployment(
        Targets,
        name=DEPLOYMENT,
        ray_actor_options={"num_cpus": 0},
        logging_config=LoggingConfig(enable_access_log=False),  # Otherwise each report of a replica would make a line.
    )
    return targets.bind(config, replica.bind(config))


def resources(config: Config) -> dict[str, float]:
    engine = config.engine
    if engine.device == "cuda":
        return {"num_cpus": 1, "num_gpus": 1}
    return {"num_cpus": engine.cpu_threads or 1}
