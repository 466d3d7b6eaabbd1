"""Chooses the replica for a request if replicas have different models.

Replicas report their models. As long as all serve the same models, one router has all of them. Otherwise, models that
the same replicas serve share a router, so the number of routers doesn't grow with the number of models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from oaiserve.wire.prefix_keys import Prompt
from oaiserve.wire.report import ReplicaReport
from oaiserve.wire.router import Router
from oaiserve.wire.routing_decision import Decision

MOST_ROUTERS = 256  # Each report of a replica goes to every router that has the replica.


class Routers:
    """The routers of all models, with the methods of `Router`. A replica without reported models serves any."""

    def __init__(self) -> None:
        self.fleet = Router()  # routes among all replicas, for models that no replica has reported
        # The replicas of each model; empty while all replicas serve the same models
        self._having: dict[str, tuple[str, ...]] = {}
        self.by_model: dict[str, Router] = {}  # up to MOST_ROUTERS different ones
        self.routers: list[Router] = [self.fleet]
        self._models: dict[str, tuple[str, ...]] = {}  # the models that each replica has reported
        self._aliases: dict[str, tuple[str, ...]] = {}  # more names that a replica accepts
        self._present: tuple[str, ...] = ()

    @property
    def differ(self) -> bool:
        return bool(self._having)

    def models_of(self, replica: str) -> tuple[str, ...]:
        return self._models.get(replica, ())

    def aliases_of(self, replica: str) -> tuple[str, ...]:
        return self._aliases.get(replica, ())

    def update_replicas(self, names: Iterable[str], now_ns: int) -> None:
        self._present = tuple(names)
        self._models = {name: self._models[name] for name in self._present if name in self._models}
        self._aliases = {name: self._aliases[name] for name in self._models}
        self._divide(now_ns)

    def exclude(self, name: str, now_ns: int) -> None:
        for router in self.routers:
            router.exclude(name, now_ns)

    def learn(self, report: ReplicaReport, now_ns: int) -> None:
        name = report.replica
        known = (self._models.get(name), self._aliases.get(name))
        if name in self._present and known != (report.models, report.aliases):
            self._models[name] = report.models
            self._aliases[name] = report.aliases
            self._divide(now_ns)
        for router in self.routers:
            router.learn(report, now_ns)

    def choose(
        self,
        prompt: Prompt,
        now_ns: int,
        session: str | None = None,
        without: Collection[str] = (),
    ) -> Decision:
        """Choose the replica for a request, among those with its model. Raises NoReplica."""
        router = self.by_model.get(prompt.model)
        if router is None:
            router = self.fleet
            if having := self._having.get(prompt.model):
                without = {*without, *self._present}.difference(set(having).difference(without))
        return router.choose(prompt, now_ns, session, without)

    def _divide(self, now_ns: int) -> None:
        """Group the models by the replicas that serve them, with a router for each group."""
        self._having = {}
        accepted = {name: (*models, *self._aliases[name]) for name, models in self._models.items()}
        if len({frozenset(names) for names in accepted.values()}) > 1:
            with_any = [name for name in self._present if not accepted.get(name)]
            having: dict[str, list[str]] = {}
            for name in self._present:
                for model in dict.fromkeys(accepted.get(name, ())):
                    having.setdefault(model, [*with_any]).append(name)
            self._having = {model: tuple(names) for model, names in having.items()}
        groups: dict[tuple[str, ...], Router] = {}
        before = self.by_model
        self.by_model = {}
        for model, names in self._having.items():
            router = groups.get(names)
            if router is None and len(groups) < MOST_ROUTERS:
                router = before.get(model)
                if router is None or router in groups.values():
                    router = Router()
                groups[names] = router
            if router is not None:
                self.by_model[model] = router
        self.routers = [self.fleet, *groups.values()]
        self.fleet.update_replicas(self._present, now_ns)
        for names, router in groups.items():
            router.update_replicas(names, now_ns)
