"""`ReplicaChoice`: which of several replicas gets a request, by the rule of the gateway (`oaiserve.wire.router`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oaiserve.engine.request import Request
from oaiserve.wire.prefix_keys import BYTES_PER_TOKEN, Prompt, key_of_session
from oaiserve.wire.report import ReplicaReport
from oaiserve.wire.router import Router
from oaiserve.wire.routing_decision import Decision


class ReplicaChoice:
    """The router of the replicas of a front. It has no lock of its own."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._router = Router()
        self._clock_ns = clock_ns

    def learn(self, report: ReplicaReport) -> None:
        """Take the report of a replica: its load, and the prefixes that it has cached."""
        self._router.learn(report, self._clock_ns())

    def choose(self, request: Request, replicas: Iterable[str]) -> Decision:
        """Choose one of the given replicas. There must be at least one."""
        now_ns = self._clock_ns()
        self._router.update_replicas(replicas, now_ns)
        prompt = request.routing
        if prompt is None:  # It has no text to compare with other prompts, such as a vector.
            prompt = Prompt((), key_of_session(request.request_id), request.num_bytes // BYTES_PER_TOKEN)
        return self._router.choose(prompt, now_ns, request.session or None)
