"""Makes exactly one record for each request to a generation route, however the request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import fields

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oaiserve.engine.request import Usage
from oaiserve.facts.record import RequestRecord
from oaiserve.http.keys import Key
from oaiserve.routes.door.middleware import as_api_error, error_response
from oaiserve.routes.exchange import COST_HEADER, REUSE_HEADER, Exchange
from oaiserve.routes.prompt_reuse import MAX_USER_AGENT_CHARACTERS, run_of
from oaiserve.routes.serving import any_serving_of
from oaiserve.wire.continuation import IDS_HEADER, ids_of
from oaiserve.wire.routing_decision import BACKGROUND_HEADER, HOPS_HEADER


def _link_to_page(scope: Scope, page: str) -> bytes:
    """Return the value of the header `link`. The address is relative, because a proxy may serve the API under a
    prefix."""
    up = "../" * (scope["raw_path"].count(b"/") - 1)
    return f'<{up}{page}>; rel="describedby"; type="text/html"'.encode()


MOST_MODEL_CHARACTERS = 256  # A record keeps this much of the name that a client sent.
_SHARED = [each.name for each in fields(RequestRecord) if hasattr(Exchange, each.name)]  # fields that both classes have


def accounted(path: str, endpoint: Callable[..., Awaitable[object]], operation: str) -> Route:
    """Return a route to the engine, each of whose requests is accounted for as this operation."""
    middleware = Middleware(Accounting, operation=operation, http_route=path)
    return Route(path, endpoint, methods=["POST"], middleware=[middleware])


def _in_order(reasons: dict[int, str]) -> tuple[str, ...]:
    return tuple(reasons[index] for index in sorted(reasons))


class Accounting:
    """ASGI middleware around a generation route. It renders the route's errors itself, so that they, too, are sent
    before `responded` is stamped."""

    def __init__(self, app: ASGIApp, *, operation: str, http_route: str) -> None:
        self.app = app
        self._operation = operation
        self._http_route = http_route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        ids = state["request_id"], state["unique_id"], state["trace"]
        key: Key | None = state["key"]
        serving = any_serving_of(Request(scope))
        clock_ns = serving.runtime.clock_ns
        use = None if key is None else key.new_use()
        exchange = Exchange(
            *ids,
            state["client"],
            clock_ns,
            state["key_name"],
            state["owner"],
            use,
            self._operation,
            self._http_route,
        )
        exchange.routing = state.get("routing", exchange.routing)
        headers = dict(reversed(Headers(scope=scope).items()))  # Of two headers with the same name, the first counts.
        exchange.is_background = state.get("is_background", False) or BACKGROUND_HEADER in headers
        exchange.ids = ids_of(headers.get(IDS_HEADER, ""))
        exchange.wants_cost = headers.get(COST_HEADER) == "true"
        exchange.wants_reuse = headers.get(REUSE_HEADER) == "true"
        exchange.prompt_reuse.run = run_of(headers)
        exchange.prompt_reuse.user_agent = headers.get("user-agent", "")[:MAX_USER_AGENT_CHARACTERS]
        exchange.prompt_reuse.is_one_of_several = HOPS_HEADER in headers
        serving.exchanges[exchange.unique_id] = exchange
        state["exchange"] = exchange
        if "model_load" in state:  # The server has several models.
            exchange.received_ns, exchange.model_load_ns = state["model_load"]

        async def stamped_receive() -> Message:
            message = await receive()
            if exchange.received_ns is None:
                exchange.received_ns = clock_ns()
            return message

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.http_status = message["status"]
                if page := scope["app"].state.pages.request:
                    link = _link_to_page(scope, f"{page}{exchange.request_id}")
                    message["headers"] = [*message["headers"], (b"link", link)]
                if use is not None:
                    limits = (await use.headers()).items()
                    encoded = [(name.encode(), value.encode()) for name, value in limits]
                    message["headers"] = [*message["headers"], *encoded]
            await send(message)

        try:
            try:
                await self.app(scope, stamped_receive, watched_send)
            except ClientDisconnect:
                exchange.client_left = True
            except (Exception, asyncio.CancelledError) as error:
                exchange.error = as_api_error(error, scope)
                if exchange.http_status is not None:
                    raise
            if exchange.error is not None and exchange.http_status is None:
                # From here on, nothing holds the body while the answer waits to be sent.
                answer = error_response(exchange.error.without_frames(), scope)
                await answer(scope, receive, watched_send)
        finally:
            if exchange.error is not None:
                exchange.error.__traceback__ = None  # Its frames hold the exchange and the body: a reference cycle.
            if exchange.stream is None:
                self._record(scope, exchange, Usage(0, 0, 0))
            else:
                # The terminal event carries the timestamps, so a request that is being aborted ends with that event.
                exchange.stream.on_end(lambda terminal: self._record(scope, exchange, terminal.usage))

    def _record(self, scope: Scope, exchange: Exchange, usage: Usage) -> None:
        serving = any_serving_of(Request(scope))
        try:
            serving.telemetry.record(self._record_of(scope, exchange, usage))
        finally:
            serving.exchanges.pop(exchange.unique_id, None)  # after the record, so that it is always in one of them
            # A connection that is kept open keeps the scope of its last request, which must not keep the prompts.
            scope.get("state", {}).pop("exchange", None)

    def _record_of(self, scope: Scope, exchange: Exchange, usage: Usage) -> RequestRecord:
        times = exchange.times.ended(exchange.clock_ns)
        if times.received is None:  # The request was answered or cancelled before its body began.
            times.received = times.responded
        serving = any_serving_of(Request(scope))
        address, port = scope.get("server") or (None, None)
        if exchange.use is not None:
            core_ns = exchange.account.core_ns
            price = exchange.account.price
            cost = (core_ns or 0) / 1e9 if price is None else price
            used = usage.prompt_tokens + usage.completion_tokens
            exchange.use.settle(used if exchange.used_tokens is None else exchange.used_tokens, cost)
        model = serving.name_of(exchange.adapter)
        requested = exchange.requested_model and exchange.requested_model[:MOST_MODEL_CHARACTERS]
        shared = {name: getattr(exchange, name) for name in _SHARED}
        own = {
            "times": times,
            "http_method": scope["method"],
            "model": model,
            "requested_model": None if requested == model else requested,
            "adapter": None if exchange.adapter is None else exchange.adapter.name,
            "client": exchange.key_name,
            "http_scheme": scope["scheme"],
            "server_address": address,
            "server_port": port,
            "error_type": type(exchange.error).__name__ if exchange.error is not None else None,
            "error_param": exchange.error.param if exchange.error is not None else None,
            "stream": exchange.is_streaming,
            "background": exchange.is_background,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "finish_reasons": _in_order(exchange.finish_reasons),
            "answer_reasons": _in_order(exchange.answer_facts.finish_reasons or exchange.finish_reasons),
            "tool_calls": exchange.answer_facts.tool_calls,
            "reasoning_tokens": exchange.answer_facts.reasoning_tokens,
            "deadline": exchange.deadline_outcome(times),
            "adapted": exchange.adaptations.notes,
        }
        return RequestRecord(**{**shared, **own})
