"""`ModelsCapacity` describes the models of a gateway of child processes to the plug-ins in front of them."""

from __future__ import annotations

from oaiserve.plugins.gateway.children.models import ChildModels
from oaiserve.plugins.gateway.gateway import Gateway


class ModelsCapacity:
    """Requests may name any of the models. Most batches name one, so the largest model sets how many run at a time."""

    step_cost = None  # A batch does not name a model.

    def __init__(self, gateway: Gateway, models: ChildModels) -> None:
        self._gateway = gateway
        self.capacity = {"max_running": max(model.config.engine.max_running for model in models.models.values())}

    @property
    def is_ready(self) -> bool:
        return self._gateway.is_ready

    def has_others(self, client: str) -> bool:
        return self._gateway.has_others(client)
