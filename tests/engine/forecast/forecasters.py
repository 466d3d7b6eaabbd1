"""A forecaster of an idle server, whose steps take 1 ms for each row, and what it is asked."""

from collections.abc import Callable
from typing import Any

from oaiserve.engine.forecast.forecaster import Asked, Forecaster
from oaiserve.engine.scheduling.blocks import BlockPool
from oaiserve.engine.scheduling.limits import Limits
from oaiserve.engine.scheduling.pacing import StepTime
from oaiserve.engine.scheduling.policy import POLICIES
from oaiserve.engine.scheduling.scheduler import Scheduler
from oaiserve.explain.step_cost import KNOTS, StepCost
from oaiserve.facts.engine_numbers import EngineNumbers

COST = StepCost(tuple(1e6 * rows for rows in KNOTS))


def make_forecaster(numbers: Callable[[], EngineNumbers]) -> Forecaster:
    """Return a forecaster that reads these numbers of its engine."""
    scheduler = Scheduler(BlockPool(64, 4), Limits(8, 256), policy=POLICIES["fair"])
    return Forecaster(scheduler, StepTime(lambda: COST, 256), lambda: COST, numbers, lambda: (None, 0))


def question(request_id: str = "r", **fields: Any) -> Asked:
    """Return the facts of a request with a prompt of 30 tokens and an answer of 9."""
    defaults = {"prompts": [[5] * 30], "limit": 9, "is_limited": True, "ends_early": False, "num_choices": 1}
    of_client = {"client": "", "operation": "chat", "grammar_kind": None, "cache_salt": "", "received_ns": 0}
    return Asked(request_id, **{**of_client, **defaults, **fields})
