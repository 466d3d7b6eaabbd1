"""`PrefixRouter` is the router of oaiserve/scale as Ray Serve's request router for the replicas.

Ray pickles this module as a whole, so it has no class that others compare.
"""

from __future__ import annotations

from random import sample
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from oaiserve.facts.report import Report
from oaiserve.facts.routing_decision import RoutingRequest
from oaiserve.facts.times import monotonic_ns
from oaiserve.scale.on_ray.private import REPORT, name_of
from oaiserve.scale.router import Router


class PrefixRouter(RequestRouter):
    """Sends requests with the same prefix to the same replica. Ray brings the present replicas and their reports.

    A replica without an open port, on a node without the front's settings, is left out.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._router = Router()
        self._open: dict[str, RunningReplica] = {}
        self._reports: dict[str, bytes] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take over the present replicas. Ray calls this for each report, with the last ones of all others."""
        super().update_replicas(replicas)
        now_ns = monotonic_ns()
        self._open = {name_of(replica): replica for replica in replicas if replica.backend_http_endpoint is not None}
        self._router.update_replicas(self._open, now_ns)
        reports = {name: replica.routing_stats.get(REPORT, b"") for name, replica in self._open.items()}
        for name, report in reports.items():
            if report and report != self._reports.get(name):
                self._router.learn(msgspec.msgpack.decode(report, type=Report).of_replica(name), now_ns)
        self._reports = reports

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the router's one choice. Raises NoReplica.

        A call without a prompt, by a handle instead of the front, goes anywhere.
        """
        request = pending_request.args[0] if pending_request is not None and pending_request.args else None
        if not isinstance(request, RoutingRequest):
            return [[replica] for replica in sample(candidate_replicas, len(candidate_replicas))]
        request.decision = self._router.choose(request.prompt, monotonic_ns(), request.session)
        return [[self._open[request.decision.replica]]]
