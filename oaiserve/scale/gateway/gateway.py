"""`Gateway` reads a request, chooses a replica, and passes the answer on as it comes.

Requests and answers are the replica's, but for a few headers. A request moves to another replica as long as nothing of
an answer has been sent: if the first one cannot be reached, is full (429) or takes none (503).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from oaiserve.engine.backpressure import SharedLimit
from oaiserve.errors import BadGateway, BodyTooLarge, NotFound, Overloaded, RequestTimeout, Unavailable
from oaiserve.facts.prefix_keys import prompt_of_body
from oaiserve.facts.routing_decision import DECISION_HEADER, Decision, as_text
from oaiserve.facts.times import monotonic_ns
from oaiserve.http.connections import CONNECTION
from oaiserve.routes import sse
from oaiserve.routes.body import client_left
from oaiserve.scale.gateway.metrics import Ending, GatewayMetrics
from oaiserve.scale.gateway.upstream import BadAnswer, CutOff, Unreachable, Upstream, UpstreamAnswer
from oaiserve.scale.gateway.watch import Watch
from oaiserve.scale.router import NoReplica, Router

log = logging.getLogger(__name__)

MOST_TRIES = 3  # replicas that are asked for one request
MOVES_ON = (429, 503)  # the statuses of refusals that another replica may not have
MOST_RECEIVED_BYTES = 256 * 2**20  # of the bodies of all requests that have no answer yet
BODY_SECONDS = 60.0
LARGE_BYTES = 64 * 1024  # larger bodies are looked at in a worker thread
MOST_EVENT_BYTES = 16 * 2**20  # of one event of a stream: the last one of /v1/responses has the whole answer
SESSION_HEADER = "x-session-id"
ROUTE_HEADER = DECISION_HEADER.encode()

# The headers of one connection, not of the next one.
_OF_CONNECTION = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"expect"),
}
# These are written anew, but for the origin, which has been checked here against a name that the replica does not know.
_NOT_ASKED = _OF_CONNECTION | {b"host", b"content-length", b"origin", b"x-request-id", b"forwarded", b"x-real-ip"}
_NOT_A_CLIENTS = (b"x-forwarded-", b"x-oaiserve-")  # told by the gateway alone
_NOT_ANSWERED = _OF_CONNECTION | {b"date", b"x-request-id", b"x-content-type-options"}
# Whoever asks for these means one replica, and would be misled by whichever answers.
_OF_ONE_REPLICA = ("/debug", "/dashboard", "/docs", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Begun:
    """An answer begun by a replica."""

    answer: UpstreamAnswer
    decision: Decision
    upstream: Upstream


class Gateway:
    """The ASGI app: it passes requests on to replicas, and their answers back.

    The layers around it have put `request_id`, `trace`, `client` and `send` into `scope["state"]`.
    """

    def __init__(self, router: Router, watch: Watch, metrics: GatewayMetrics, body_limit: int) -> None:
        self._router = router
        self._watch = watch
        self._metrics = metrics
        self._body_limit = body_limit
        self._received = SharedLimit(MOST_RECEIVED_BYTES)
        self.is_draining = False

    @property
    def is_ready(self) -> bool:
        return self._watch.num_ready > 0 and not self.is_draining

    def drain(self) -> None:
        """Take no further requests. A signal handler may call this."""
        self.is_draining = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises the gateway's own errors, before the status line."""
        ending = Ending.REFUSED
        try:
            ending = await self._pass_on(scope, receive, send)
        except ClientDisconnect:
            ending = Ending.CANCELLED
        except NoReplica:
            ending = Ending.NO_REPLICA
            raise Unavailable("No replica can be reached; try again later.", retry_after_seconds=5) from None
        finally:
            self._metrics.requests.labels(ending).inc()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> Ending:
        path, client = scope["path"], scope["state"]["client"]
        if path.startswith(_OF_ONE_REPLICA) or not {".", ".."}.isdisjoint(path.split("/")):
            raise NotFound(f"{path[:100]} is about one replica. Ask that one itself.")
        if self.is_draining:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        body = bytearray()
        try:
            await self._read(receive, client, body)
            left = asyncio.create_task(client_left(receive))
            try:
                begun = await self._ask(scope, body, left)
                self._received.give_back(client, len(body))
                body = bytearray()  # a stream may last for long, and nobody needs it any more
                begun.upstream.num_open += 1
                try:
                    return await self._relay(scope, send, begun, left)
                finally:
                    begun.upstream.num_open -= 1
                    begun.answer.close()
            finally:
                left.cancel()
        finally:
            self._received.give_back(client, len(body))

    async def _read(self, receive: Receive, client: str, body: bytearray) -> None:
        """Read the body. Raises BodyTooLarge, Overloaded, RequestTimeout and ClientDisconnect."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part = message.get("body", b"")
                    if len(body) + len(part) > self._body_limit:
                        raise BodyTooLarge(f"The body is too large: at most {int(self._body_limit)} bytes are read.")
                    if not self._received.take(client, len(part)):
                        text = "Too many large bodies are under way already; try again later."
                        raise Overloaded(text, retry_after_seconds=1)
                    body += part
                    if not message.get("more_body"):
                        return
        except TimeoutError:
            text = f"The body did not arrive within {BODY_SECONDS:g} seconds. Please try again."
            raise RequestTimeout(text) from None

    async def _ask(self, scope: Scope, body: bytearray, left: asyncio.Task[None]) -> _Begun:
        """Have a replica begin an answer. Raises NoReplica and ClientDisconnect."""
        began_ns, metrics = monotonic_ns(), self._metrics
        prompt = await asyncio.to_thread(prompt_of_body, body) if len(body) > LARGE_BYTES else prompt_of_body(body)
        session = Headers(scope=scope).get(SESSION_HEADER)
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        query = scope["query_string"]
        # The path that has been judged, and not another one that a replica may take for it.
        target = quote(scope["path"], safe="/:@!$&'()*+,;=~").encode() + (b"?" + query if query else b"")
        given = (header for header in scope["headers"] if header[0] not in _NOT_ASKED)
        headers = [header for header in given if not header[0].startswith(_NOT_A_CLIENTS)]
        headers.append((b"x-request-id", scope["state"]["request_id"].encode()))
        headers.append((b"x-forwarded-proto", scope["scheme"].encode()))
        if client := scope["state"]["client"]:
            headers.append((b"x-forwarded-for", client.encode()))
        tried: list[str] = []
        moves = ""  # why it moves on
        refused: _Begun | None = None
        while len(tried) < MOST_TRIES:
            try:
                decision = self._router.choose(prompt, monotonic_ns(), session, tried)
            except NoReplica:
                break
            if tried:
                metrics.moved.labels(moves).inc()
            else:
                metrics.choice_seconds.observe((monotonic_ns() - began_ns) / 1e9)
            metrics.choices.labels(decision.replica, decision.reason).inc()
            tried.append(decision.replica)
            upstream = self._watch.upstreams[decision.replica]
            upstream.num_open += 1
            try:
                asking = upstream.ask(method, target, [*headers, (ROUTE_HEADER, as_text(decision).encode())], body)
                begun = _Begun(await _unless_left(asking, left), decision, upstream)
            except Unreachable as error:
                moves = "unreachable"
                self._watch.exclude(upstream.name, str(error))
                continue
            except BadAnswer as error:
                log.warning("The replica %s has answered what is no HTTP: %s", upstream.name, error)
                raise BadGateway("The answer to this request could not be read. Please try again.") from None
            finally:
                upstream.num_open -= 1
            status = begun.answer.status
            if status not in MOVES_ON:
                metrics.wait_seconds.observe((monotonic_ns() - began_ns) / 1e9)
                metrics.expected_hit_tokens.inc(decision.expected_hit_tokens)
                return begun
            moves, refused = str(status), begun
            if status == 503:
                self._watch.exclude(upstream.name, "it takes no requests (503)")
        if refused is None:
            raise NoReplica
        return refused

    async def _relay(self, scope: Scope, send: Send, begun: _Begun, left: asyncio.Task[None]) -> Ending:
        """Send an answer as it comes, until its end. Raises ClientDisconnect."""
        answer, decision = begun.answer, begun.decision
        headers = [header for header in answer.headers if header[0] not in _NOT_ANSWERED]
        headers.append((ROUTE_HEADER, as_text(decision, names_replica=False).encode()))
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        send_part: Send = scope["state"]["send"]  # past the layers around this, which would cost each part some time
        left.add_done_callback(lambda _: answer.close())
        is_stream = answer.header(b"content-type").startswith(b"text/event-stream")
        rest = b""  # of a stream: an event that is not complete
        try:
            while part := await answer.read():
                if is_stream:
                    whole, mark, rest = (rest + part).rpartition(b"\n\n")
                    part = whole + mark
                if part:
                    await send_part({"type": "http.response.body", "body": part, "more_body": True})
                if len(rest) > MOST_EVENT_BYTES:
                    raise CutOff(f"an event of more than {MOST_EVENT_BYTES} bytes")
        except CutOff as error:
            if left.done():
                raise ClientDisconnect from None
            self._watch.exclude(decision.replica, f"it has cut off an answer: {error}")
            if is_stream:
                text = "The replica that wrote this answer has ended. Please try again."
                await send_part({"type": "http.response.body", "body": _last_events(scope, text), "more_body": False})
            else:
                scope["extensions"][CONNECTION]["cut"]()  # no status can say it any more
            return Ending.CUT_OFF
        except asyncio.CancelledError:  # the shutdown cuts off running requests
            if not is_stream:
                raise
            text = "The server is shutting down. Please try again."
            await send_part({"type": "http.response.body", "body": _last_events(scope, text), "more_body": False})
            return Ending.CUT_OFF
        await send_part({"type": "http.response.body", "body": rest, "more_body": False})
        return Ending.ANSWERED


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
    body = Unavailable(message).body(request_id=state["request_id"], trace_id=state["trace"].trace_id_hex)
    if scope["path"].rstrip("/").endswith("/responses"):
        return sse.event(msgspec.json.encode({"type": "error", **body["error"], **body}), "error")
    return sse.event(msgspec.json.encode(body)) + sse.event(b"[DONE]")
