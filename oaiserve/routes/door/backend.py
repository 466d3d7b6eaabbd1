"""`Backend` answers requests that a plug-in sends by itself, such as the lines of a batch. It is stored in
`app.state.backend`.

It is a server of one model with its own routes, or the front of several models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.types import ASGIApp

from oaiserve.config import Config
from oaiserve.explain.step_cost import StepCost
from oaiserve.http.keys import Keyring
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.runtime import Runtime


class Capacity(Protocol):
    """The abilities of a backend's models."""

    @property
    def capacity(self) -> Mapping[str, Any]: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def step_cost(self) -> StepCost | None: ...


@dataclass(frozen=True, slots=True)
class Backend:
    config: Config
    answer: ASGIApp  # the routes, without the middleware for requests from outside
    engine: Capacity
    bodies: Bodies
    keys: Keyring | None
    has_others: Callable[[str], bool]  # whether other clients have open requests
    runtime: Runtime
