"""`Gateway` reads a request, chooses a replica, and passes the answer on as it comes.

Requests and answers are the replica's, but for a few headers. A request moves to another replica as long as nothing of
an answer has been sent: if the first one cannot be reached, is full (429) or takes none (503). A stream that a replica
does not end goes on at another one, behind what the client has (facts/continuation.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from random import getrandbits
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oaiserve.config import RouteOptions, ServerOptions
from oaiserve.engine.backpressure import SharedLimit
from oaiserve.errors import (
    ANTHROPIC_PATH,
    MODELS_PATH,
    REASON_HEADER,
    BadGateway,
    LoopDetected,
    NotFound,
    Unavailable,
)
from oaiserve.facts.continuation import IDS_HEADER, KIND_HEADER, SENT_HEADER, StreamIds, StreamSplitter
from oaiserve.facts.prefix_keys import Prompt, prompt_of_body
from oaiserve.facts.report import Within
from oaiserve.facts.routing_decision import (
    BACKGROUND_HEADER,
    DECISION_HEADER,
    HOPS_HEADER,
    OWNER_HEADER,
    Decision,
    as_text,
)
from oaiserve.facts.times import WAITED_HEADER, Phase, monotonic_ns
from oaiserve.facts.trace import Attempt, TraceContext
from oaiserve.http.connections import CONNECTION
from oaiserve.http.keys import Key
from oaiserve.routes import sse
from oaiserve.routes.batches.routes import MOST_FILE_BYTES
from oaiserve.routes.body import client_left, read_into
from oaiserve.routes.serving import MEDIA_BODY_BYTES, MOST_RECEIVED_BYTES
from oaiserve.scale.children.models import ChildModels
from oaiserve.scale.gateway.lists import (
    REQUESTS_PATH,
    SCHEMA_PATH,
    all_kept,
    all_requests,
    models_answer,
    schema_answer,
)
from oaiserve.scale.gateway.metrics import Ending, GatewayMetrics
from oaiserve.scale.gateway.sent_pieces import MOST_KEPT_BYTES, SentPieces
from oaiserve.scale.gateway.sources import UNREADABLE
from oaiserve.scale.gateway.upstream import BadAnswer, CutOff, Unreachable, Upstream, UpstreamAnswer
from oaiserve.scale.gateway.watch import Watch
from oaiserve.scale.router import NoReplica
from oaiserve.scale.routers import Routers
from oaiserve.telemetry import names

if TYPE_CHECKING:
    from oaiserve.telemetry.tracing import Tracing

log = logging.getLogger(__name__)

MOST_TRIES = 3  # replicas that are asked for one request
MOST_HOPS = 4  # gateways that a request may pass
NO_BODY = (204, 304)  # statuses of answers without a body, whatever their length says
MOVES_ON = (429, 503)  # the statuses of refusals that another replica may not have
MOST_LISTS = 4  # requests for lists that are answered at once
GO_ON_SECONDS, PAUSE_SECONDS = 60.0, 0.2  # in which a replica must be found for a stream that was cut off
UNLIKE = b": the answer goes on at a server of another kind\n\n"
SIGN_OF_LIFE, SIGN_OF_LIFE_SECONDS = b": the answer is about to go on\n\n", 2.0
LARGE_BYTES = 64 * 1024  # larger bodies are looked at in a worker thread
MOST_EVENT_BYTES = 16 * 2**20  # of one event of a stream: the last one of /v1/responses has the whole answer
SESSION_HEADER = "x-session-id"
DEADLINES = (b"x-ttft-deadline-ms", b"x-deadline-ms")
ROUTE_HEADER, TRACEPARENT = DECISION_HEADER.encode(), b"traceparent"

# The headers of one connection, not of the next one.
_OF_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
# These are written anew, but for the origin, which has been checked here against a name that the replica does not know.
_OF_BODY = {b"content-length", b"content-encoding"}
_NOT_ASKED = _OF_CONNECTION | _OF_BODY | {b"host", b"origin", b"x-request-id", b"forwarded", b"x-real-ip"}
_NOT_A_CLIENTS = (b"x-forwarded-", b"x-oaiserve-")  # told by the gateway alone
_NOT_ANSWERED = _OF_CONNECTION | {b"date", b"x-request-id", b"x-content-type-options", KIND_HEADER.encode()}
# Whoever asks for these means one replica, and would be misled by whichever answers.
ADAPTER_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_INSIDE = ("/admin", "/debug", "/dashboard")
_OF_ONE_REPLICA = (*_INSIDE, *ADAPTER_PATHS)
# What one replica keeps, unless all have one store: it is asked for until one has it.
_KEPT_BY_ONE = (b"/v1/responses/resp_", b"/v1/conversations", b"/v1/files/", b"/v1/batches", b"/debug/requests/")
_LISTS = ("/v1/files", "/v1/batches")
# A replica may have stored something before it failed.
_NOT_REPEATED = (b"/v1/conversations", b"/v1/files", b"/v1/batches")

Result = TypeVar("Result")


@dataclass(slots=True)
class _Asked:
    """A request as replicas get it, and the pieces of its answer that the client has."""

    method: str
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytearray
    prompt: Prompt
    session: str | None
    began_ns: int
    trace: TraceContext
    sent: SentPieces
    attempts: list[Attempt] = field(default_factory=list)
    status: int | None = None  # of the answer that the client has
    deadlines_ms: tuple[int | None, int | None] = (None, None)  # of its first token and its end, since it began

    def within(self, now_ns: int) -> Within | None:
        """Return the time that is left of each of its deadlines. A stream that goes on has had its first token."""
        first, end = self.deadlines_ms
        if first is end is None:
            return None
        gone = (now_ns - self.began_ns) / 1e9
        return Within(
            None if first is None or self.sent.number else first / 1e3 - gone, None if end is None else end / 1e3 - gone
        )

    def deadline_headers(self, within: Within | None, *, is_beside: bool) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a replica what is left. One beside it counts from when the request came here."""
        left_ms = [None if left is None else max(1, int(left * 1e3)) for left in within or ()]
        told = zip(DEADLINES, self.deadlines_ms if is_beside else left_ms, strict=False)
        return [(name, b"%d" % milliseconds) for name, milliseconds in told if milliseconds is not None]

    @property
    def looks_for_one(self) -> bool:
        """Return whether it is about something that one replica may have, and others not."""
        return self.target.startswith(_KEPT_BY_ONE)

    @property
    def may_be_repeated(self) -> bool:
        """Return whether another replica may be asked after one has failed at the request."""
        return self.method == "GET" or not self.target.startswith(_NOT_REPEATED)


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer begun by a replica."""

    answer: UpstreamAnswer
    decision: Decision
    upstream: Upstream
    attempt: Attempt

    @property
    def is_stream(self) -> bool:
        return self.answer.is_stream

    @property
    def may_go_on(self) -> bool:
        """Return whether it is a stream with marks."""
        return self.is_stream and any(name == KIND_HEADER.encode() for name, _ in self.answer.headers)

    @property
    def kind(self) -> bytes:
        return self.answer.header(KIND_HEADER.encode())


class Gateway:
    """The ASGI app: it passes requests on to replicas, and their answers back.

    The layers around it have put `request_id`, `trace`, `client` and `send` into `scope["state"]`.
    """

    def __init__(
        self,
        router: Routers,
        watch: Watch,
        metrics: GatewayMetrics,
        server: ServerOptions,
        options: RouteOptions,
        tracing: Tracing | None,
        models: ChildModels | None = None,
    ) -> None:
        """`models` are those of its child processes, if these are its replicas."""
        self._router = router
        self._models = models
        self._watch = watch
        self._metrics = metrics
        self._tracing = tracing
        self._shows_requests = server.shows_dashboard  # of its replicas
        self.body_limit = options.body_limit or MEDIA_BODY_BYTES
        self._continues = options.continue_streams
        self._received = SharedLimit(MOST_RECEIVED_BYTES)  # bodies of requests without an answer
        self._kept = SharedLimit(MOST_KEPT_BYTES)  # pieces of streams
        self._listing = asyncio.Semaphore(MOST_LISTS)
        self._is_told_loop = False
        self._unmarked: set[str] = set()  # replicas whose streams cannot go on
        self.is_draining = False

    @property
    def is_ready(self) -> bool:
        """Return whether it takes requests. Requests for a model that is not loaded wait for its process."""
        has_replicas = self._models is not None or bool(self._watch.joined - self._watch.silent)
        return has_replicas and not self.is_draining

    def drain(self) -> None:
        """Take no further requests. A signal handler may call this."""
        self.is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises the gateway's own errors, before the status line."""
        ending, began_ns = Ending.REFUSED, monotonic_ns()
        try:
            ending = await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            ending = Ending.CANCELLED
        except NoReplica:
            ending = Ending.NO_REPLICA
            text = "No replica can be reached" if self._models is None else "No such model is loaded"
            raise Unavailable(f"{text}; try again later.", retry_after_seconds=5) from None
        finally:
            if not scope["path"].startswith(REQUESTS_PATH):  # the page polls it
                self._metrics.requests.labels(ending).inc()
            asked = scope["state"].pop("asked", None)  # a connection that is kept open keeps the scope
            if asked is not None:
                asked.sent.clear()
            if self._tracing is not None and asked is not None:
                found: dict[str, Any] = {names.HTTP_REQUEST_METHOD: asked.method, names.URL_PATH: scope["path"]}
                if asked.status is not None:
                    found[names.HTTP_RESPONSE_STATUS] = asked.status
                if ending in (Ending.CUT_OFF, Ending.NO_REPLICA):
                    found[names.ERROR_TYPE] = ending.value
                whole = Phase(f"{asked.method} {scope['path'][:100]}", began_ns, monotonic_ns())
                self._tracing.record_passed(asked.trace, whole, found, asked.attempts)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> Ending:
        path, client = scope["path"], scope["state"]["client"]
        if self._refuses(path) or not {".", ".."}.isdisjoint(path.split("/")):
            raise NotFound(f"{path[:100]} is about one replica. Ask that one itself.")
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        num_hops = _num_hops(scope)
        if num_hops >= MOST_HOPS:
            if not self._is_told_loop:
                self._is_told_loop = True
                text = "A request has passed %d gateways: does a --replica of this one, or of one before it, lead back?"
                log.error(text, num_hops)
            raise LoopDetected(f"The request has passed {num_hops} gateways, and at most {MOST_HOPS} are allowed.")
        body = bytearray()
        try:
            limit_bytes = MOST_FILE_BYTES if path == "/v1/files" else self.body_limit
            await read_into(body, Request(scope, receive), self._received, limit_bytes)  # routing needs the prompt
            left = asyncio.create_task(client_left(receive))
            try:
                sent = SentPieces(self._kept, client)
                asked = await _asked(scope, body, sent, num_hops, has_ids=self._continues != "never")
                scope["state"]["asked"] = asked
                if listing := self._listing_for(scope, asked):
                    await (await _unless_left(self._in_turn(listing), left))(scope, receive, send)
                    return Ending.ANSWERED
                if self._tracing is not None:  # each attempt has its own
                    asked.headers = [header for header in asked.headers if header[0] != TRACEPARENT]
                async with AsyncExitStack() as stack:
                    if self._models is not None and path in ADAPTER_PATHS:
                        asked.prompt = asked.prompt._replace(model=_model_of_adapter(self._models, asked))
                    if self._models is not None and not path.startswith(_INSIDE):
                        await self._have_model(asked, scope["state"]["key"], self._models, stack, left)
                    begun = await self._begin(asked, left)
                    if path in ADAPTER_PATHS:  # the next request may name the adapter
                        await self._watch.refresh(begun.upstream)
                    if not begun.may_go_on:
                        self._received.give_back(client, len(body))
                        asked.body = body = bytearray()  # nobody needs it any more
                    return await self._relay(scope, send, asked, begun, left)
            finally:
                left.cancel()
        finally:
            self._received.give_back(client, len(body))

    def _refuses(self, path: str) -> bool:
        """Return whether a path is about one replica, so that a gateway refuses it. Of child processes, a request names
        one by its model."""
        if not path.startswith(_OF_ONE_REPLICA) or self._models is not None:
            return False
        is_shown = self._shows_requests and (path == REQUESTS_PATH or path.startswith(f"{REQUESTS_PATH}/"))
        return not is_shown

    def _listing_for(self, scope: Scope, asked: _Asked) -> Callable[[], Awaitable[Response]] | None:
        """Return what answers with a list of all replicas, if the request is for one."""
        # With several models here, a request that names one is sent to its process alone.
        if (
            scope["path"] == REQUESTS_PATH
            and asked.method == "GET"
            and not (self._models is not None and asked.prompt.model)
        ):
            query = scope["query_string"].decode("latin-1")
            return partial(all_requests, self._watch, query, asked.headers)
        if scope["path"] == MODELS_PATH and self._router.differ:
            return partial(models_answer, self._watch, self._router, scope, asked.headers)
        if scope["path"] == SCHEMA_PATH and self._models is None:
            return partial(schema_answer, self._watch, self._refuses, asked.headers)
        if scope["path"] in _LISTS and asked.method == "GET":
            return partial(all_kept, self._watch, asked.target, asked.headers)
        return None

    async def _in_turn(self, listing: Callable[[], Awaitable[Response]]) -> Response:
        """Return a list once few others are under way: each may take much memory."""
        async with self._listing:
            return await listing()

    async def _have_model(
        self, asked: _Asked, key: Key | None, models: ChildModels, stack: AsyncExitStack, left: asyncio.Task[None]
    ) -> None:
        """Wait until the model of a request is loaded, and keep it loaded as long as `stack` is open. Raises
        Forbidden."""
        name = models.name_for(asked.prompt.model)
        if key is not None and not asked.looks_for_one:
            key.check_model(name)
        waited_ns = await _unless_left(stack.enter_async_context(models.in_use(name)), left)
        asked.headers.append((WAITED_HEADER.encode(), b"%d %d" % (asked.began_ns, waited_ns)))
        if key is not None:
            asked.headers.append((OWNER_HEADER.encode(), key.digest.hex().encode()))
        if not asked.looks_for_one:
            asked.prompt = asked.prompt._replace(model=name)

    async def _begin(self, asked: _Asked, left: asyncio.Task[None]) -> _Begun:
        """Have a replica begin an answer. Raises NoReplica and ClientDisconnect."""
        try:
            return await self._ask(asked, left)
        except NoReplica:
            if self._models is None or not asked.prompt.model:
                raise
            await _unless_left(self._models.loaded(asked.prompt.model), left)
            return await self._ask(asked, left)

    async def _ask(self, asked: _Asked, left: asyncio.Task[None], *tried_before: str) -> _Begun:
        """Have a replica that was not tried begin an answer. Raises NoReplica, BadGateway and ClientDisconnect."""
        answers: list[_Begun] = []
        try:
            answers.append(await self._ask_in_turn(asked, left, [*tried_before], answers))
            return answers.pop()
        finally:
            for unused in answers:
                unused.answer.close()

    async def _ask_in_turn(
        self, asked: _Asked, left: asyncio.Task[None], tried: list[str], passed: list[_Begun]
    ) -> _Begun:
        """Ask replicas until one does not refuse. The answers of those before it are put into `passed`.

        If one fails (500), another one gets the same request. Only where that answers is the first one to blame, and
        not the request.
        """
        metrics = self._metrics
        headers = asked.headers
        body = asked.body
        if asked.sent.number:
            sent = asked.sent.as_json()
            headers, body = [*headers, (SENT_HEADER.encode(), b"%d" % len(sent))], body + sent
        moves = ""  # why it moves on
        refused: _Begun | None = None
        failed: _Begun | None = None
        while len(tried) < MOST_TRIES or asked.looks_for_one:
            try:
                within = asked.within(now_ns := monotonic_ns())
                decision = self._router.choose(asked.prompt, now_ns, asked.session, tried, within)
            except NoReplica:
                break
            if moves:
                metrics.moved.labels(moves).inc()
            elif not tried:
                metrics.choice_seconds.observe((monotonic_ns() - asked.began_ns) / 1e9)
            tried.append(decision.replica)
            upstream = self._watch.upstreams[decision.replica]
            metrics.choices.labels(str(upstream.number), decision.reason).inc()
            upstream.num_open += 1
            address = upstream.address
            found: dict[str, str | int] = {names.SERVER_ADDRESS: address.name}
            if address.path is None:
                found = {names.SERVER_ADDRESS: address.ip, names.SERVER_PORT: address.port}
            found[names.HTTP_REQUEST_METHOD] = asked.method
            asked.attempts.append(attempt := Attempt(monotonic_ns(), found))
            own = [(ROUTE_HEADER, as_text(decision).encode())]
            own += asked.deadline_headers(within, is_beside=self._models is not None)
            if self._tracing is not None:
                is_sampled = self._tracing.is_sampled(asked.trace)
                own.append((TRACEPARENT, asked.trace.traceparent(attempt.span_id, is_sampled=is_sampled).encode()))
            try:
                asking = upstream.ask(asked.method, asked.target, [*headers, *own], body)
                begun = _Begun(await _unless_left(asking, left), decision, upstream, attempt)
            except Unreachable as error:
                moves = "unreachable"
                attempt.end(monotonic_ns(), moves)
                self._watch.exclude(upstream.name, str(error))
                self._watch.failed(upstream, str(error))
                continue
            except BadAnswer as error:
                attempt.end(monotonic_ns(), "no HTTP")
                log.warning("The replica %s has answered what is no HTTP: %s", upstream.shown, error)
                self._watch.failed(upstream, f"no HTTP: {error}")
                raise BadGateway("The answer to this request could not be read. Please try again.") from None
            finally:
                upstream.num_open -= 1
            attempt.attributes[names.HTTP_RESPONSE_STATUS] = status = begun.answer.status
            is_failure = status >= 500 and status not in (503, LoopDetected.status)
            if is_failure and failed is None and asked.may_be_repeated:
                passed.append(begun)
                failed = begun
                moves = "500"
                attempt.end(monotonic_ns(), str(status))
                continue
            # Another replica may not have what the request is about, such as an earlier response.
            is_elsewhere = status == 404 and (asked.looks_for_one or failed is not None)
            if status not in MOVES_ON and not is_elsewhere:
                if failed is not None and status < 400:
                    text = f"an answer of {failed.answer.status} to a request that another replica has answered"
                    self._watch.failed(failed.upstream, text)
                if not asked.sent.number:
                    metrics.wait_seconds.observe((monotonic_ns() - asked.began_ns) / 1e9)
                metrics.expected_hit_tokens.inc(decision.expected_hit_tokens)
                return begun
            passed.append(begun)
            moves, refused = str(status), begun
            attempt.end(monotonic_ns(), moves)
            if status == 503 and not begun.answer.header(REASON_HEADER.encode()):
                self._watch.exclude(upstream.name, "it takes no requests (503)")
        last = failed or refused
        if last is None:
            raise NoReplica
        passed.remove(last)
        return last

    def _warn_of_unmarked(self, upstream: Upstream) -> None:
        """Warn once about a replica whose streams have no marks. Not about the processes of several models: they trust
        this one, so their streams lack marks for other reasons."""
        if self._models is None and self._continues != "never" and upstream.name not in self._unmarked:
            self._unmarked.add(upstream.name)
            text = "Streams of replica %s end with it, unless its --trusted-proxy has the address of this gateway"
            log.warning(text, upstream.shown)

    async def _relay(self, scope: Scope, send: Send, asked: _Asked, begun: _Begun, left: asyncio.Task[None]) -> Ending:
        """Send an answer as it comes, until its end. Raises ClientDisconnect."""
        answer, kind = begun.answer, begun.kind
        asked.status = answer.status
        dropped = _NOT_ANSWERED | {b"content-length"} if answer.status in NO_BODY else _NOT_ANSWERED
        if not self._shows_requests:
            dropped = dropped | {b"link"}  # to the page of its request
        headers = [header for header in answer.headers if header[0] not in dropped]
        headers.append((ROUTE_HEADER, as_text(begun.decision, names_replica=False).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        send_part: Send = scope["state"]["send"]  # past the layers around this, which would cost each part some time
        is_stream, may_go_on = begun.is_stream, begun.may_go_on
        # Streams of GET, such as the live page's, are never continued.
        if is_stream and not may_go_on and asked.method == "POST":
            self._warn_of_unmarked(begun.upstream)
        signs: asyncio.Task[None] | None = None  # of life, in the pause of a stream that was cut off
        num_sent, num_cuts, give_up_ns = -1, 0, 0  # pieces at the last cut, and cuts since there was a further piece
        # These have cut off the stream. If none can go on with it, it is to blame, and not they.
        cutters: list[tuple[Upstream, str]] = []
        while True:
            ending = Ending.ANSWERED
            try:
                rest = await self._send_parts(begun, asked, send_part, left, signs)
                self._blame(cutters)
            except CutOff as error:
                if left.done():
                    raise ClientDisconnect from None
                begun.attempt.end(monotonic_ns(), "cut off")
                num_cuts += 1
                if asked.sent.number > num_sent:
                    self._blame(cutters)
                    self._watch.exclude(begun.upstream.name, f"it has cut off an answer: {error}")
                    num_sent = asked.sent.number
                    num_cuts = 0
                    give_up_ns = monotonic_ns() + int(GO_ON_SECONDS * 1e9)
                cutters.append((begun.upstream, f"an answer cut off: {error}"))
                may_go_on = may_go_on and not asked.sent.is_forgotten
                if not may_go_on:
                    self._blame(cutters)
                if may_go_on and (signs is None or signs.done()):
                    signs = asyncio.create_task(_show_signs_of_life(send_part, left))
                if may_go_on and (again := await self._go_on(asked, begun, kind, left, num_cuts, give_up_ns)):
                    begun = again
                    if not kind or begun.kind != kind:
                        await send_part({"type": "http.response.body", "body": UNLIKE, "more_body": True})
                    continue
                if not is_stream:
                    scope["extensions"][CONNECTION]["cut"]()  # no status can say it any more
                    return Ending.CUT_OFF
                ending, why = Ending.CUT_OFF, "The replica that wrote this answer has ended. Please try again."
                rest = _last_events(scope, why)
            except asyncio.CancelledError:  # the shutdown cuts off running requests
                if not is_stream:
                    raise
                ending, rest = Ending.CUT_OFF, _last_events(scope, "The server is shutting down. Please try again.")
            if signs is not None:
                signs.cancel()
            await send_part({"type": "http.response.body", "body": rest, "more_body": False})
            return ending

    def _blame(self, cutters: list[tuple[Upstream, str]]) -> None:
        for upstream, why in cutters:
            self._watch.failed(upstream, why)
        cutters.clear()

    async def _send_parts(
        self, begun: _Begun, asked: _Asked, send_part: Send, left: asyncio.Task[None], signs: asyncio.Task[None] | None
    ) -> bytes:
        """Send what comes from a replica, and return the end of its answer. The signs of life end with the first part.
        Raises CutOff, behind whole pieces."""
        answer = begun.answer
        events = StreamSplitter(is_marked=begun.may_go_on)
        left.add_done_callback(lambda _: answer.close())
        begun.upstream.num_open += 1
        try:
            while part := await answer.read():
                if begun.is_stream:
                    try:
                        part, pieces = events.push(part)
                    except msgspec.MsgspecError as error:
                        raise CutOff(f"a mark that is none: {error}") from None
                    asked.sent.add(pieces)
                if part:
                    if signs is not None:
                        signs.cancel()
                    await send_part({"type": "http.response.body", "body": part, "more_body": True})
                if len(events.rest) > MOST_EVENT_BYTES:
                    raise CutOff(f"an event of more than {MOST_EVENT_BYTES} bytes")
            if asked.method == "POST" and answer.status < 400:
                begun.upstream.num_failures = begun.upstream.num_pauses = 0
            return bytes(events.rest)
        finally:
            begun.attempt.end(monotonic_ns())
            begun.upstream.num_open -= 1
            answer.close()

    async def _go_on(
        self, asked: _Asked, cut: _Begun, kind: bytes, left: asyncio.Task[None], num_cuts: int, give_up_ns: int
    ) -> _Begun | None:
        """Have another replica go on with a stream. Return None if none does in time. Raises ClientDisconnect."""
        with suppress(asyncio.CancelledError):  # of the shutdown: then the stream ends with an error
            # A child process that is started again has the same address.
            cutters = [cut.decision.replica] if self._models is None else []
            if num_cuts:  # replicas cut it off one after the other
                await _unless_left(asyncio.sleep(PAUSE_SECONDS * 2 ** min(num_cuts, 5)), left)
            while monotonic_ns() < give_up_ns and not self.is_draining:
                with suppress(NoReplica, BadGateway):
                    begun = await self._ask(asked, left, *cutters)
                    is_alike = bool(kind) and begun.kind == kind
                    if begun.answer.status == 200 and begun.may_go_on and (is_alike or self._continues == "any"):
                        self._metrics.continued.labels("alike" if is_alike else "unlike").inc()
                        return begun
                    begun.answer.close()
                    is_of_store = begun.answer.header(REASON_HEADER.encode()) == b"store"
                    if is_of_store or (begun.answer.status < 500 and begun.answer.status != 429):
                        break
                await _unless_left(asyncio.sleep(PAUSE_SECONDS), left)
        self._metrics.continued.labels("failed").inc()
        return None


class _Adapter(msgspec.Struct):
    lora_name: str = ""


def _model_of_adapter(models: ChildModels, asked: _Asked) -> str:
    """Return the model of a request to load or unload an adapter. Raises InvalidRequest and ModelNotFound."""
    name = ""
    with suppress(*UNREADABLE):  # which the model's process refuses
        name = msgspec.json.decode(asked.body, type=_Adapter).lora_name
    is_new = asked.target.startswith(ADAPTER_PATHS[0].encode())
    return models.name_for_adapter(asked.prompt.model, name, is_new=is_new)


def _num_hops(scope: Scope) -> int:
    """Return how many gateways a request has passed. Anybody may say so, and have it refused."""
    text = Headers(scope=scope).get(HOPS_HEADER, "")
    return int(text) if text.isdecimal() and len(text) == 1 else 0


async def _asked(scope: Scope, body: bytearray, sent: SentPieces, num_hops: int, *, has_ids: bool) -> _Asked:
    began_ns = monotonic_ns()
    prompt = await asyncio.to_thread(prompt_of_body, body) if len(body) > LARGE_BYTES else prompt_of_body(body)
    if scope["path"].startswith(f"{MODELS_PATH}/"):
        prompt = prompt._replace(model=scope["path"].removeprefix(f"{MODELS_PATH}/"))
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    query, state = scope["query_string"], scope["state"]
    if scope["path"].startswith(_OF_ONE_REPLICA):  # of several models, it may name one
        fields = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        prompt = prompt._replace(model=dict(fields).get("model", ""))
        query = urlencode([(name, value) for name, value in fields if name != "model"]).encode()
    # The path that has been judged, and not another one that a replica may take for it.
    target = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode() + (b"?" + query if query else b"")
    given = (header for header in scope["headers"] if header[0] not in _NOT_ASKED)
    headers = [header for header in given if not header[0].startswith(_NOT_A_CLIENTS)]
    headers.append((b"x-request-id", state["request_id"].encode()))
    headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
    headers.append((HOPS_HEADER.encode(), b"%d" % (num_hops + 1)))
    if client := state["client"]:
        headers.append((b"x-forwarded-for", client.encode()))
    if state.get("is_background"):
        headers.append((BACKGROUND_HEADER.encode(), b"1"))
    if method == "POST" and has_ids:
        ids = StreamIds(state["unique_id"], int(time.time()), getrandbits(63))
        headers.append((IDS_HEADER.encode(), ids.as_text.encode()))
    session = Headers(scope=scope).get(SESSION_HEADER)
    asked = _Asked(method, target, headers, body, prompt, session, began_ns, state["trace"], sent)
    # A replica counts from when it gets the request, so it is told what is left: the earlier one of header and body.
    found = {name: int(value) for name, value in headers if name in DEADLINES and value.isdigit() and len(value) < 10}
    found = {name: milliseconds for name, milliseconds in found.items() if milliseconds}
    both = [(found.get(name), own) for name, own in zip(DEADLINES, prompt.deadlines_ms, strict=True)]
    first, end = (min((one for one in two if one is not None), default=None) for two in both)
    asked.deadlines_ms = first, end
    asked.headers = [header for header in headers if header[0] not in found]
    return asked


async def _show_signs_of_life(send_part: Send, left: asyncio.Task[None]) -> None:
    """Write a comment now and then, until it is cancelled or the request ends: clients give up what is silent."""
    while not (await asyncio.wait({left}, timeout=SIGN_OF_LIFE_SECONDS))[0]:
        await send_part({"type": "http.response.body", "body": SIGN_OF_LIFE, "more_body": True})


async def _unless_left(work: Coroutine[Any, Any, Result], left: asyncio.Task[None]) -> Result:
    """Return the result of the work, or raise its error. ClientDisconnect cancels it."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()


def _last_events(scope: Scope, message: str) -> bytes:
    """Return the end of a stream without an end from its replica."""
    state = scope["state"]
    path, ids = scope["path"], {"request_id": state["request_id"], "trace_id": state["trace"].trace_id_hex}
    body = Unavailable(message).body(path, **ids)
    if path.startswith(ANTHROPIC_PATH):
        return sse.event(msgspec.json.encode(body), "error")
    if path.rstrip("/").endswith("/responses"):
        return sse.event(msgspec.json.encode({"type": "error", **body["error"], **body}), "error")
    return sse.event(msgspec.json.encode(body)) + sse.event(b"[DONE]")
