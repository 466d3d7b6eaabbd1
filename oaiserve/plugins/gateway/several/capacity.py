"""`ModelsCapacity` describes several models to the plug-ins in front of them."""

from __future__ import annotations

from oaiserve.plugins.gateway.several.front import Front


class ModelsCapacity:
    """Requests may name any of the models. Most batches name one, so the largest model sets how many run at a time."""

    step_cost = None  # A batch does not name a model.

    def __init__(self, front: Front) -> None:
        self._front = front
        self.capacity = {"max_running": max(model.config.engine.max_running for model in front.models.by_name.values())}

    @property
    def is_ready(self) -> bool:
        return not self._front.is_draining
