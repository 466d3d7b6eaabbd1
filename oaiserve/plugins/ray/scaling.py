"""`desired_replicas`: the autoscaling policy of replicas, for `policy_function` in Ray Serve's configuration.

Ray counts the requests that pass through Ray, and those of replicas don't.
"""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext


def desired_replicas(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the open requests need, by `target_ongoing_requests`. Ray applies delays and bounds."""
    by_replica = (context.aggregated_metrics or {}).get("open_requests", {})
    if not by_replica or context.config is None:
        return context.target_num_replicas, {}
    return sum(by_replica.values()) / context.config.target_ongoing_requests, {}
