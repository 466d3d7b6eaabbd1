"""`Gateway` reads a request, lets replicas answer it, and passes the answer on as it arrives.

Only a few headers of requests and answers are the gateway's own. A request moves to another replica as long as no part
of an answer has been sent: if the first one cannot be reached, is full (429) or takes none (503). If a replica doesn't
end a stream, another one continues it after the part that the client has (wire/continuation.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oaiserve.config import Config
from oaiserve.errors import ANTHROPIC_PATH, FILES_PATH, MODELS_PATH, LoopDetected, NotFound, Unavailable
from oaiserve.facts.times import Phase
from oaiserve.http.fair_turns import TurnWorkers, Work
from oaiserve.http.shared_limit import SharedLimit
from oaiserve.plugins.gateway.attempts import Attempts
from oaiserve.plugins.gateway.client_request import (
    OF_ONE_REPLICA,
    ClientRequest,
    client_request_of,
    num_hops_of,
    without_trace,
)
from oaiserve.plugins.gateway.lists import (
    CLIENTS_PATH,
    REQUESTS_PATH,
    SCHEMA_PATH,
    all_clients,
    all_kept,
    all_of_anthropic,
    all_requests,
    answers_of_all,
    models_answer,
    schema_answer,
)
from oaiserve.plugins.gateway.metrics import Ending, GatewayMetrics
from oaiserve.plugins.gateway.options import RouteOptions
from oaiserve.plugins.gateway.relay import Relay
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sent_pieces import MOST_KEPT_BYTES, SentPieces
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.routes.door.middleware import is_of_anthropic
from oaiserve.routes.intake.bodies import Bodies
from oaiserve.routes.intake.receive import HeldBytes, read_into
from oaiserve.routes.intake.turns import client_left, unless_left
from oaiserve.routes.serving import MEDIA_BODY_BYTES, MOST_FILE_BYTES, MOST_RECEIVED_BYTES
from oaiserve.runtime import Runtime
from oaiserve.telemetry import names
from oaiserve.wire.router import NoReplica

if TYPE_CHECKING:
    from oaiserve.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MOST_HOPS = 4  # maximum gateways that a request may pass
MOST_LISTS = 4  # maximum requests for lists that are answered at the same time
_OF_ALL = {REQUESTS_PATH: all_requests, CLIENTS_PATH: all_clients}  # answers from all replicas, for pages
_LISTS = (FILES_PATH, "/v1/batches")
_MESSAGE_BATCHES = f"{ANTHROPIC_PATH}/batches"
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})
_IDS = re.compile(r"/(responses|requests|files|batches|conversations|items|models)/[^/]+")


class Gateway:
    """The ASGI app: it passes requests on to replicas, and their answers back.

    The layers around it have put `request_id`, `trace`, `client` and `send` into `scope["state"]`.
    """

    def __init__(
        self,
        router: Routers,
        watch: Watch,
        metrics: GatewayMetrics,
        config: Config,
        options: RouteOptions,
        tracing: Tracing | None,
        runtime: Runtime,
    ) -> None:
        self.router = router
        self._runtime = runtime
        self.watch = watch
        self.metrics = metrics
        self._tracing = tracing
        self._shows_requests = config.shows_dashboard  # requests of its replicas
        self.bodies = Bodies(
            options.body_limit or MEDIA_BODY_BYTES, SharedLimit(MOST_RECEIVED_BYTES), self._run_in_turns
        )
        self._workers: TurnWorkers | None = None
        self._continues = options.continue_streams
        self.kept = SharedLimit(MOST_KEPT_BYTES)  # pieces of streams
        self._listing = asyncio.Semaphore(MOST_LISTS)
        self._has_warned_of_loop = False
        self.is_draining = False
        self._attempts = Attempts(router, watch, metrics, tracing, runtime.clock_ns)
        self._relay = Relay(
            self._attempts, options.continue_streams, lambda: self.is_draining, shows_requests=self._shows_requests
        )

    @property
    def is_ready(self) -> bool:
        """Return whether it takes requests."""
        return bool(self.watch.joined - self.watch.silent) and not self.is_draining

    def drain(self) -> None:
        """Accept no further requests. A signal handler may call this."""
        self.is_draining = True

    def _run_in_turns(self, work: Work[Any], *, client: str, num_bytes: int) -> Future[Any]:
        """Read a large body for a part of this process, which has no engine. Most gateways never need the threads."""
        if self._workers is None:
            self._workers = TurnWorkers(1, "intake", runtime=self._runtime)
        return self._workers.run(work, client=client, num_bytes=num_bytes)

    async def stop(self) -> None:
        """End the threads that read large bodies."""
        if self._workers is not None:
            await asyncio.to_thread(self._workers.stop)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises the gateway's own errors, before the status line."""
        ending = Ending.REFUSED
        began_ns = self._runtime.clock_ns()
        try:
            ending = await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            ending = Ending.CANCELLED
        except NoReplica:
            ending = Ending.NO_REPLICA
            raise Unavailable("No replica can be reached; try again later.", retry_after_seconds=5) from None
        finally:
            if not scope["path"].startswith((*_OF_ALL,)):  # the pages poll these
                self.metrics.requests.labels(ending).inc()
            request = scope["state"].pop("request", None)  # a connection that is kept open keeps the scope
            if request is not None:
                request.sent.clear()
            if self._tracing is not None and request is not None:
                attributes: dict[str, Any] = {names.HTTP_REQUEST_METHOD: request.method, names.URL_PATH: scope["path"]}
                if request.status is not None:
                    attributes[names.HTTP_RESPONSE_STATUS] = request.status
                if ending in (Ending.CUT_OFF, Ending.NO_REPLICA):
                    attributes[names.ERROR_TYPE] = ending.value
                name = span_name(request.method, scope["path"], request.status)
                whole = Phase(name, began_ns, self._runtime.clock_ns())
                self._tracing.record_passed(request.trace, whole, attributes, request.attempts)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> Ending:
        path = scope["path"]
        client = scope["state"]["client"]
        if self._refuses(path) or not {".", ".."}.isdisjoint(path.split("/")):
            raise NotFound(f"{path[:100]} is about one replica. Ask that one itself.")
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        num_hops = num_hops_of(scope)
        if num_hops >= MOST_HOPS:
            if not self._has_warned_of_loop:
                self._has_warned_of_loop = True
                text = "A request has passed %d gateways: does a --replica of this one, or of one before it, lead back?"
                log.error(text, num_hops)
            raise LoopDetected(f"The request has passed {num_hops} gateways, and at most {MOST_HOPS} are allowed.")
        body = bytearray()
        with HeldBytes(self.bodies.received, client) as held:
            limit_bytes = MOST_FILE_BYTES if path == FILES_PATH else self.bodies.limit_bytes
            await read_into(body, Request(scope, receive), held, limit_bytes)  # routing needs the prompt
            left = asyncio.create_task(client_left(receive))
            try:
                sent = SentPieces(self.kept, client)
                has_ids = self._continues != "never"
                request = await client_request_of(scope, body, sent, num_hops, self._runtime, has_ids=has_ids)
                scope["state"]["request"] = request
                if listing := self._listing_for(scope, request):
                    await (await unless_left(self._in_turn(listing), left))(scope, receive, send)
                    return Ending.ANSWERED
                if self._tracing is not None:  # Each attempt has its own span.
                    request.headers = without_trace(request.headers, request.trace)
                begun = await self._attempts.begin(request, left)
                if not begun.may_go_on:
                    held.give_back(held.number)
                    request.body = body = bytearray()  # It is no longer needed.
                return await self._relay.pass_on(scope, send, request, begun, left)
            finally:
                left.cancel()

    def _refuses(self, path: str) -> bool:
        """Return whether a gateway refuses a path because it is about one replica."""
        if not path.startswith(OF_ONE_REPLICA):
            return False
        is_shown = path in _OF_ALL or path.startswith(f"{REQUESTS_PATH}/")
        return not (self._shows_requests and is_shown)

    def _listing_for(self, scope: Scope, request: ClientRequest) -> Callable[[], Awaitable[Response]] | None:
        if request.method != "GET":
            return None  # A replica refuses it.
        if scope["path"] in _OF_ALL:
            ask = partial(answers_of_all, self.watch, headers=request.headers)
            return partial(_OF_ALL[scope["path"]], ask, scope["query_string"].decode("latin-1"))
        if scope["path"] == MODELS_PATH and self.router.differ:
            return partial(models_answer, self.watch, self.router, scope, request.headers)
        if scope["path"] == SCHEMA_PATH:
            return partial(schema_answer, self.watch, self._refuses, request.headers)
        if scope["path"] == FILES_PATH and is_of_anthropic(scope):
            return partial(all_of_anthropic, self.watch, request.target, request.headers, "file", has_next_page=True)
        if scope["path"] == _MESSAGE_BATCHES:
            return partial(all_of_anthropic, self.watch, request.target, request.headers, "batch", has_next_page=False)
        if scope["path"] in _LISTS:
            return partial(all_kept, self.watch, request.target, request.headers)
        return None

    async def _in_turn(self, listing: Callable[[], Awaitable[Response]]) -> Response:
        """Return a list once few others are in progress, because each may take much memory."""
        async with self._listing:
            return await listing()


def span_name(method: str, path: str, status: int | None) -> str:
    """Return the name of a request's span. Collectors expect few names, so ids and paths without a route are left
    out."""
    if method not in _METHODS:
        method = "HTTP"  # as in OpenTelemetry's conventions
    if status in (404, 405) or (status is None and method != "POST"):
        return method
    template = _IDS.sub(r"/\1/{id}", path)
    return f"{method} {template[:100]}"
