"""ASGI middleware for every request: ids and headers, slashes, and errors as OpenAI's error object.

This file knows nothing of models or of the engine. `access.py` decides about access.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.errors import (
    ANTHROPIC_PATH,
    FILES_PATH,
    MODELS_PATH,
    APIError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    RequestTimeout,
    Unavailable,
)
from oaiserve.facts.trace import TraceContext
from oaiserve.hosts import is_address
from oaiserve.http.connections import CONNECTION, client_of
from oaiserve.http.fair_turns import CpuTime
from oaiserve.http.refusals import RECORDED_NS, UNREAD_NS
from oaiserve.routes.door.foreign_paths import ours_for
from oaiserve.routes.intake.receive import announced_bytes
from oaiserve.routes.operation import serves
from oaiserve.runtime import Runtime
from oaiserve.wire.continuation import IDS_HEADER, ids_of
from oaiserve.wire.routing_decision import DECISION_HEADER, of_text

logger = logging.getLogger(__name__)

# This many characters of an unknown path are compared with all routes, which takes a fraction of a millisecond.
MOST_COMPARED_CHARACTERS = 60
LEAST_LIKENESS = 0.8  # minimum similarity of a path and the route suggested for it, from 0 to 1, without the prefix
_PREFIX = "/v1"  # Most routes begin with this, so it is left out when paths are compared for similarity.
_NO_THREAD = "can't start new thread"  # the text of CPython's RuntimeError
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RequestHeaders:
    """Gives the request its ids, and puts its id, its trace and the time so far into the headers of the response.

    `scope["state"]` gets `request_id` (the client's own if it is well-formed), `unique_id` (always ours), `trace`,
    `client` (its address, until a key names it), `cpu`, `key` and `key_name` (None) and `owner` ("", likewise),
    `routing` (the decision of a router in front, if there is one), and `send`, through which the chunks of a stream
    bypass the layers in between. A route that translates another one's answer replaces `send`, but not `client_send`.
    `is_sampled` returns whether the spans of a trace will be exported; requests without an account have none. If it is
    None, the server behind this one adds the trace and the time.
    """

    def __init__(
        self, app: ASGIApp, *, runtime: Runtime, is_sampled: Callable[[TraceContext], bool] | None = None
    ) -> None:
        self.app = app
        self._clock_ns = runtime.clock_ns
        self._token_hex = runtime.token_hex
        self._is_sampled = is_sampled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started_ns = self._clock_ns()
        ids = request_ids(scope, self._token_hex)
        request_id = ids["request_id"]
        trace = ids["trace"]
        state = scope.setdefault("state", {})
        state.update(ids, key=None, key_name=None, owner="", send=send, client_send=send)
        if decision := Headers(scope=scope).get(DECISION_HEADER):
            state["routing"] = of_text(decision)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                response = MutableHeaders(scope=message)
                response["x-request-id"] = request_id
                if is_of_anthropic(scope):
                    response["request-id"] = request_id
                if self._is_sampled is not None:
                    response["openai-processing-ms"] = str((self._clock_ns() - started_ns) // 1_000_000)
                    is_sampled = "exchange" in scope["state"] and self._is_sampled(trace)
                    response["traceresponse"] = trace.traceparent(trace.span_id, is_sampled=is_sampled)
                connection = scope.get("extensions", {}).get(CONNECTION)
                if connection is not None and connection["awaits_body"]():
                    # Otherwise the rest of the body would have to be read before the next request, however long it is.
                    response["connection"] = "close"
            await send(message)

        await self.app(scope, receive, send_with_headers)


def is_of_anthropic(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API. Both APIs have the same paths for models and for files."""
    path: str = scope["path"]
    return path.startswith(ANTHROPIC_PATH) or (
        path.startswith((MODELS_PATH, FILES_PATH)) and "anthropic-version" in Headers(scope=scope)
    )


def request_ids(scope: Scope, token_hex: Callable[[int], str]) -> dict[str, Any]:
    """Return the ids of a request for its state: `request_id`, `unique_id`, `trace`, the address as `client`, and `cpu`
    for the time of work on its body."""
    headers = Headers(scope=scope)
    unique_id = token_hex(16)  # It can't be guessed: without API keys, only its id protects a response.
    request_id = headers.get("x-request-id", "")
    if _REQUEST_ID.fullmatch(request_id) is None:
        request_id = f"req-{unique_id}"
    parents = headers.getlist("traceparent")
    # If there are two `traceparent` headers, neither is more likely to be right. A long `tracestate` may be split.
    parent = parents[0] if len(parents) == 1 else None
    trace = TraceContext.from_headers(parent, ",".join(headers.getlist("tracestate")) or None)
    address, _ = scope.get("client") or ("", 0)  # A proxy may have taken it from a header of the client's.
    client = address if is_address(address) else ""
    return {"request_id": request_id, "unique_id": unique_id, "trace": trace, "client": client, "cpu": CpuTime()}


def lasting_id(request: Request) -> str:
    """Return the id for everything that a request stores. All servers that a gateway sends the request to use the same
    one."""
    ids = ids_of(request.headers.get(IDS_HEADER, ""))
    unique_id: str = request.state.unique_id if ids is None else ids.unique_id
    return unique_id


class PacedRefusals:
    """Holds back refusals of clients that get many, as `Refusals` says, and notes the delay in the request's account.
    Accepted requests are held back, too, if their route sets `scope["state"]["charged_ns"]`, the CPU time that `cpu`
    doesn't count.

    The 429 of a full server is sent at once, so that another one can be tried, and so is the 408 of a request that has
    waited for long.
    """

    def __init__(self, app: ASGIApp, *, clock_ns: Callable[[], int]) -> None:
        self.app = app
        self._clock_ns = clock_ns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        connection = scope.get("extensions", {}).get(CONNECTION)

        async def paced_send(message: Message) -> None:
            is_start = connection is not None and message["type"] == "http.response.start"
            if is_start and (is_refusal(message["status"]) or "charged_ns" in scope["state"]):
                await self._hold_back(scope, _cpu_ns(scope))
            await send(message)

        await self.app(scope, receive, paced_send)

    async def _hold_back(self, scope: Scope, cpu_ns: int) -> None:
        state = scope["state"]
        if delay_ns := charge(scope, cpu_ns):
            began_ns = self._clock_ns()
            with suppress(asyncio.CancelledError):  # The server shuts down: the client gets its answer now.
                await asyncio.sleep(delay_ns / 1e9)
            if "exchange" in state:
                state["exchange"].held_back(began_ns)


def charge(scope: Scope, cpu_ns: int) -> int:
    """Charge the client of a request, its key or its address, for a refusal that took `cpu_ns` in addition to
    REFUSAL_NS. Count the time for which to hold the refusal back, and return it in nanoseconds."""
    address, _ = scope.get("client") or ("", 0)
    client = scope["state"]["owner"].encode() or (client_of(address) if is_address(address) else b"")
    delay_ns: int = scope["extensions"][CONNECTION]["charge"](client, cpu_ns)
    if delay_ns:
        scope["app"].state.count_refusal_delay(delay_ns)
    return delay_ns


def _cpu_ns(scope: Scope) -> int:
    """Return the CPU time of a request that is charged, beyond what every refused one takes."""
    state = scope["state"]
    cpu_ns: int = state["cpu"].ns + state.get("charged_ns", 0)
    if "exchange" in state:
        cpu_ns += RECORDED_NS
    if scope["extensions"][CONNECTION]["awaits_body"]():
        cpu_ns += int(UNREAD_NS * announced_bytes(Headers(scope=scope)))
    return cpu_ns


def is_refusal(status: int) -> bool:
    """Return whether a status says that the client made a mistake."""
    return 400 <= status < 500 and status not in (RequestTimeout.status, Overloaded.status)


class TidyPath:
    """Treats /v1//models and /v1/models/ as /v1/models, because base URLs often end with a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and ("//" in scope["path"] or scope["path"].endswith("/")):
            scope["path"] = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        await self.app(scope, receive, send)


class Errors:
    """Answers exceptions of the app with OpenAI's error object. This is the outermost handler of errors."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = True
            await send(message)

        failure: APIError | None = None
        try:
            await self.app(scope, receive, watched_send)
        except ClientDisconnect:
            pass  # there is no client left to answer
        except (Exception, asyncio.CancelledError, SystemExit, KeyboardInterrupt) as error:  # A plug-in may exit.
            if is_started:
                raise  # the server can only close the connection
            failure = as_api_error(error, scope)
        if failure is not None:
            await error_response(failure.without_frames(), scope)(scope, receive, send)


def as_api_error(error: BaseException, scope: Scope) -> APIError:
    """Return the error for the client. An unexpected exception is logged, and its text is not shown."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, asyncio.CancelledError):  # The server cancels running requests when the drain time is over.
        return Unavailable("The server is shutting down. Please try again.")
    request_id = scope["state"]["request_id"]
    if isinstance(error, MemoryError) or str(error) == _NO_THREAD:
        logger.warning(
            "Request %s was refused, because the system gave it no memory or no thread: %r", request_id, error
        )
        return Unavailable("The server has no memory, or no thread, left for this request. Please try again later.")
    logger.error("Request %s failed with an unexpected error.", request_id, exc_info=error)
    return InternalError(f"The server failed on this request. Its log says why, under the request id {request_id}.")


def error_response(error: APIError, scope: Scope) -> Response:
    state = scope["state"]
    state["cpu"].ns += error.worker_ns
    path = ANTHROPIC_PATH if is_of_anthropic(scope) else scope["path"]
    body = error.body(path, request_id=state["request_id"], trace_id=state["trace"].trace_id_hex)
    return json_response(body, status=error.status, headers=error.headers())


def json_response(content: object, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def _hint(path: str, routes: Sequence[BaseRoute], task: str) -> str:
    """Return a hint for a client with an unknown path: the route for this task that it probably means, and where all
    routes are listed."""
    served = {
        route.path: " and ".join(sorted((route.methods or set()) - {"HEAD"})) + f" {route.path}"
        for route in routes
        if isinstance(route, Route) and "{" not in route.path and serves(route.endpoint, task)
    }
    meant = ""
    if len(path) <= MOST_COMPARED_CHARACTERS:
        without_prefix = {each.removeprefix(_PREFIX): each for each in served}
        if (of_another := ours_for(path, served)) is not None:
            whose, here = of_another
            meant = (f"That is a path of {whose}. " if whose else "") + f"Did you mean {served[here]}? "
        elif nearest := get_close_matches(path.removeprefix(_PREFIX), without_prefix, n=1, cutoff=LEAST_LIKENESS):
            meant = f"Did you mean {served[without_prefix[nearest[0]]]}? "
    listing = next((page for page in ("/docs", "/openapi.json") if page in served), None)
    if listing:
        return f"{meant}GET {listing} lists all routes."
    return meant


async def render_http_exception(request: Request, error: Exception) -> Response:
    """Answer the exceptions of starlette, such as its 404 and 405, with OpenAI's error object instead of plain text."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:100]
    headers = {**(error.headers or {})}
    api_error: APIError
    if error.status_code == 405:
        # A path with several methods has several routes, and starlette names the methods of only one.
        matching = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
        methods = {method for route in matching if isinstance(route, Route) for method in route.methods or ()}
        headers["allow"] = ", ".join(sorted(methods))
        allowed = " and ".join(sorted(methods - {"HEAD"}))
        api_error = MethodNotAllowed(f"{request.method} is not allowed on {path}, which takes {allowed}.")
    elif error.status_code == 404:
        task = getattr(getattr(request.app.state, "serving", None), "task", "generate")  # a gateway has no model
        hint = _hint(path, request.app.routes, task)
        api_error = NotFound(f"There is no {request.method} {path} on this server. {hint}".rstrip())
    else:
        api_error = InvalidRequest(error.detail)
        api_error.status = error.status_code
    response = error_response(api_error, request.scope)
    response.headers.update(headers)
    return response
