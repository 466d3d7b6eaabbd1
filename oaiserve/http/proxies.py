"""`TrustedProxies` accepts a request's client address and gateway headers only from the operator's proxies."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from oaiserve.wire.routing_decision import HOPS_HEADER

HOPS = HOPS_HEADER.encode()


class TrustedProxies:
    """Takes the client's address from `x-forwarded-for` of a trusted peer.

    Drops the headers of gateways (x-oaiserve-*) from all other peers, because clients may choose neither the ids of
    their answers nor which part of them was sent. The count of gateways stays, because it must also reveal a loop of
    gateways that don't trust each other.
    """

    def __init__(self, app: ASGIApp, trusted: Iterable[str]) -> None:
        self._app = app
        self._behind_proxy = ProxyHeadersMiddleware(app, [*trusted])  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if (scope.get("client") or ("", 0))[0] in self._behind_proxy.trusted_hosts:
                return await self._behind_proxy(scope, receive, send)  # type: ignore[arg-type]
            scope["headers"] = [h for h in scope["headers"] if h[0] == HOPS or not h[0].startswith(b"x-oaiserve-")]
        await self._app(scope, receive, send)
