"""`ByUse` is the policy by which Ray Serve adds and removes replicas: by their use, waiting requests included.

Ray pickles this module to its controller, so it imports nothing of oaiserve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

USE = "use"  # the name of the number that each replica records


class ByUse:
    """Requests the number of replicas at which the use of each would be `target_use`.

    The use of a replica is 1 if its KV cache or its batch is full, and above 1 if requests wait: these count as if they
    were in there. Ray applies the bounds and delays of the deployment's `autoscaling_config` to the answer.
    """

    def __init__(self, target_use: float = 0.8) -> None:
        if not 0 < target_use <= 1:
            raise ValueError(f"target_use is {target_use}, but must be above 0 and at most 1.")
        self._target_use = target_use

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, which Ray rounds up, and no state. The context is Ray's AutoscalingContext."""
        uses: Mapping[Any, float] = (context.aggregated_metrics or {}).get(USE, {})
        if not uses:
            return context.target_num_replicas, {}
        # Those that have not recorded anything yet are taken to be used like the others.
        total = sum(uses.values()) / len(uses) * max(len(uses), context.current_num_replicas)
        return total / self._target_use, {}


def use(
    kv_use: float, waiting_tokens: float, kv_tokens: int, num_running: int, num_waiting: int, max_running: int
) -> float:
    """Return the use of a replica: of its KV cache or of its places, whichever is more."""
    return max(kv_use + waiting_tokens / kv_tokens, (num_running + num_waiting) / max_running)
