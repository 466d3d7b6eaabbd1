"""`Attempts` sends a request to one replica after the other, until one does not refuse it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oaiserve.errors import REASON_HEADER, BadGateway, LoopDetected
from oaiserve.facts.trace import Attempt
from oaiserve.plugins.gateway.client_request import TRACEPARENT, ClientRequest
from oaiserve.plugins.gateway.metrics import GatewayMetrics
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.upstream import BadAnswer, Unreachable, Upstream, UpstreamAnswer
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.routes.intake.turns import unless_left
from oaiserve.telemetry import names
from oaiserve.wire.continuation import KIND_HEADER, SENT_HEADER
from oaiserve.wire.router import NoReplica
from oaiserve.wire.routing_decision import DECISION_HEADER, Decision, as_text

if TYPE_CHECKING:
    from oaiserve.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MOST_TRIES = 3  # maximum replicas that get the same request
MOVES_ON = (429, 503)  # statuses of refusals after which another replica may accept the request
ROUTE_HEADER = DECISION_HEADER.encode()


@dataclass(frozen=True, slots=True)
class BegunAnswer:
    answer: UpstreamAnswer
    decision: Decision
    upstream: Upstream
    attempt: Attempt

    @property
    def is_stream(self) -> bool:
        return self.answer.is_stream

    @property
    def may_go_on(self) -> bool:
        """Return whether another replica could continue the answer: only a stream with marks."""
        return self.is_stream and any(name == KIND_HEADER.encode() for name, _ in self.answer.headers)

    @property
    def kind(self) -> bytes:
        return self.answer.header(KIND_HEADER.encode())


@dataclass(frozen=True, slots=True)
class Attempts:
    """The choice of replicas, and the requests to them."""

    router: Routers
    watch: Watch
    metrics: GatewayMetrics
    tracing: Tracing | None
    clock_ns: Callable[[], int]

    async def begin(
        self, request: ClientRequest, left: asyncio.Task[None], *tried_before: str, kind: bytes = b""
    ) -> BegunAnswer:
        """Let a replica that was not tried begin an answer, if possible none that is known to be of another `kind`.
        Raises NoReplica, BadGateway and ClientDisconnect."""
        answers: list[BegunAnswer] = []
        try:
            answers.append(await self._ask_in_turn(request, left, [*tried_before], answers, kind))
            return answers.pop()
        finally:
            for unused in answers:
                unused.answer.close()

    async def _ask_in_turn(
        self, request: ClientRequest, left: asyncio.Task[None], tried: list[str], passed: list[BegunAnswer], kind: bytes
    ) -> BegunAnswer:
        """Ask replicas until one does not refuse. The answers of the earlier ones are added to `passed`.

        If one fails (500), another gets the same request. If that one succeeds, the first replica is to blame,
        otherwise the request.
        """
        metrics = self.metrics
        headers = request.headers
        body = request.body
        if request.sent.number:
            sent = request.sent.as_json()
            headers = [*headers, (SENT_HEADER.encode(), b"%d" % len(sent))]
            body = body + sent
        moves = ""  # the reason for the next move
        refused: BegunAnswer | None = None
        failed: BegunAnswer | None = None
        while len(tried) < MOST_TRIES or request.looks_for_one:
            try:
                decision = self._choose(request, now_ns := self.clock_ns(), tried, kind)
            except NoReplica:
                break
            if moves:
                metrics.moved.labels(moves).inc()
            elif not tried:
                metrics.choice_seconds.observe((self.clock_ns() - request.began_ns) / 1e9)
            tried.append(decision.replica)
            upstream = self.watch.upstreams[decision.replica]
            metrics.choices.labels(str(upstream.number), decision.reason).inc()
            upstream.num_open += 1
            address = upstream.address
            attributes: dict[str, str | int] = {names.SERVER_ADDRESS: address.ip, names.SERVER_PORT: address.port}
            attributes[names.HTTP_REQUEST_METHOD] = request.method
            request.attempts.append(attempt := Attempt(self.clock_ns(), attributes))
            own = [(ROUTE_HEADER, as_text(decision).encode())]
            own += request.deadline_headers(now_ns)
            if self.tracing is not None:
                is_sampled = self.tracing.is_sampled(request.trace)
                own.append((TRACEPARENT, request.trace.traceparent(attempt.span_id, is_sampled=is_sampled).encode()))
            try:
                asking = upstream.ask(request.method, request.target, [*headers, *own], body)
                begun = BegunAnswer(await unless_left(asking, left), decision, upstream, attempt)
            except Unreachable as error:
                moves = "unreachable"
                attempt.end(self.clock_ns(), moves)
                self.watch.exclude(upstream.name, str(error))
                self.watch.failed(upstream, str(error))
                continue
            except BadAnswer as error:
                attempt.end(self.clock_ns(), "no HTTP")
                log.warning("The replica %s has answered what is no HTTP: %s", upstream.shown, error)
                self.watch.failed(upstream, f"no HTTP: {error}")
                raise BadGateway("The answer to this request could not be read. Please try again.") from None
            finally:
                upstream.num_open -= 1
            attempt.attributes[names.HTTP_RESPONSE_STATUS] = status = begun.answer.status
            upstream.kind = begun.kind or upstream.kind
            is_failure = status >= 500 and status not in (503, LoopDetected.status)
            if is_failure and failed is None and request.may_be_repeated:
                passed.append(begun)
                failed = begun
                moves = "500"
                attempt.end(self.clock_ns(), str(status))
                continue
            # Another replica may lack the object of the request, such as an earlier response.
            is_elsewhere = status == 404 and (request.looks_for_one or failed is not None)
            if status not in MOVES_ON and not is_elsewhere:
                if failed is not None and status < 400:
                    text = f"an answer of {failed.answer.status} to a request that another replica has answered"
                    self.watch.failed(failed.upstream, text)
                if not request.sent.number:
                    metrics.wait_seconds.observe((self.clock_ns() - request.began_ns) / 1e9)
                metrics.expected_hit_tokens.inc(decision.expected_hit_tokens)
                return begun
            passed.append(begun)
            moves = str(status)
            refused = begun
            attempt.end(self.clock_ns(), moves)
            if status == 503 and not begun.answer.header(REASON_HEADER.encode()):
                self.watch.exclude(upstream.name, "it takes no requests (503)")
        last = failed or refused
        if last is None or self._may_be_at_another(request, last, passed):
            raise NoReplica
        passed.remove(last)
        return last

    def _may_be_at_another(self, request: ClientRequest, last: BegunAnswer, passed: list[BegunAnswer]) -> bool:
        """Return whether a replica that has not answered, for example because it is being started again, may have the
        object of a request that the others do not have."""
        if not request.looks_for_one or last.answer.status != 404:
            return False
        return not self.watch.upstreams.keys() <= {begun.upstream.name for begun in passed}

    def _choose(self, request: ClientRequest, now_ns: int, tried: list[str], kind: bytes) -> Decision:
        """Choose a replica that was not tried and does not hang, one of another kind only if there is no other. Raises
        NoReplica."""
        tried = [*tried, *self.watch.hung]
        if kind:
            unlike = [one.name for one in self.watch.upstreams.values() if one.kind not in (b"", kind)]
            with suppress(NoReplica):
                return self.router.choose(request.prompt, now_ns, request.session, [*tried, *unlike])
        return self.router.choose(request.prompt, now_ns, request.session, tried)
