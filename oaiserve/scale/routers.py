"""Chooses the replica for a request where replicas have different models: each model has a router of its own.

Replicas report what they serve. As long as all serve the same, one router has them all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from oaiserve.facts.prefix_keys import Prompt
from oaiserve.facts.report import ReplicaReport, Within
from oaiserve.facts.routing_decision import Decision
from oaiserve.scale.router import NoReplica, Router


class Routers:
    """The routers of all models, behind the methods of `Router`. A replica that does not say its models has any."""

    def __init__(self, *, is_strict: bool = False) -> None:
        """If it is strict, a model that no replica has reported has no replica."""
        self._is_strict = is_strict
        self._all = Router()  # of all replicas, for models that none is known to have
        self._by_model: dict[str, Router] = {}  # empty while all replicas serve the same
        self._models: dict[str, tuple[str, ...]] = {}  # by replica, as it has reported them
        self._present: tuple[str, ...] = ()

    @property
    def differ(self) -> bool:
        """Return whether replicas have different models."""
        return bool(self._by_model)

    def models_of(self, replica: str) -> tuple[str, ...]:
        return self._models.get(replica, ())

    def update_replicas(self, names: Iterable[str], now_ns: int) -> None:
        self._present = tuple(names)
        self._models = {name: self._models[name] for name in self._present if name in self._models}
        self._divide(now_ns)

    def exclude(self, name: str, now_ns: int) -> None:
        for router in (self._all, *self._by_model.values()):
            router.exclude(name, now_ns)

    def learn(self, report: ReplicaReport, now_ns: int) -> None:
        if report.replica in self._present and self._models.get(report.replica) != report.models:
            self._models[report.replica] = report.models
            self._divide(now_ns)
        for router in (self._all, *self._by_model.values()):
            router.learn(report, now_ns)

    def choose(
        self,
        prompt: Prompt,
        now_ns: int,
        session: str | None = None,
        without: Collection[str] = (),
        within: Within | None = None,
    ) -> Decision:
        """Choose the replica for a request, among those with its model. Raises NoReplica."""
        router = self._by_model.get(prompt.model)
        if router is None:
            if self._is_strict and prompt.model:
                raise NoReplica(f"no replica has the model {prompt.model}")
            router = self._all
        return router.choose(prompt, now_ns, session, without, within)

    def _divide(self, now_ns: int) -> None:
        served = {frozenset(models) for models in self._models.values()}
        models = frozenset[str]().union(*served) if len(served) > 1 or self._is_strict else ()
        self._by_model = {model: self._by_model.get(model) or Router() for model in models}
        self._all.update_replicas(self._present, now_ns)
        for model, router in self._by_model.items():
            having = (name for name in self._present if model in (self._models.get(name) or (model,)))
            router.update_replicas(having, now_ns)
