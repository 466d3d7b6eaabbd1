"""ASGI middleware for access: the allowed names of the server, origins of web pages, and API keys.

A browser gives every page its user's place in the network. A page can send requests to a server on the same machine,
and can read the answers if its own name is made to point to that machine. So the server answers only to its own names,
and only to its own pages and those that the operator allows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NoReturn

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from oaiserve.errors import APIError, Forbidden, InvalidRequest, Unauthorized
from oaiserve.facts.record import AccessRefusal
from oaiserve.hosts import Authority, host_name, is_address, is_loopback, is_same_origin, parse_authority
from oaiserve.http.keys import Key, Keyring, Right
from oaiserve.routes.pages import Pages

logger = logging.getLogger(__name__)

CountRefusal = Callable[[AccessRefusal], None]  # must not block

# Each reason has a text of its own, because the log limits messages by their text.
_REFUSED = {
    AccessRefusal.HOST: "Refused a request by a host name that is not allowed: %s",
    AccessRefusal.ORIGIN: "Refused a request of a web page of another origin: %s",
    AccessRefusal.MISSING_KEY: "Refused a request without an API key: %s",
    AccessRefusal.UNKNOWN_KEY: "Refused a request with an unknown API key: %s",
    AccessRefusal.ROLE: "Refused a request whose API key lacks the right: %s",
}


def _refuse(scope: Scope, reason: AccessRefusal, error: APIError, count: CountRefusal, value: str = "") -> NoReturn:
    """Count the refusal of `value`, a name or an origin, never a key, log it with the client's address, and raise."""
    count(reason)
    state = scope["state"]
    request = f"{scope['method']} {scope['path'][:100]!r} from {state['client'] or 'an unknown address'}"
    shown = f"{value[:200]!r}, " if value else ""
    logger.warning(_REFUSED[reason], f"{shown}{request}, request {state['request_id']}")
    raise error


class Hosts:
    """Accepts only requests to one of this server's names, and from web pages of its own or an allowed origin.

    A server for this machine only (`listens_on` is a loopback address) has the loopback names and addresses, and
    `allowed`. Any other server has every name. If some are `allowed`, it has only these, the loopback names, and all IP
    addresses: an attacking page needs a name, while probes often use addresses. A request of HTTP/1.0 may name no host,
    since no browser does that.
    """

    def __init__(
        self, app: ASGIApp, *, listens_on: str, allowed: tuple[str, ...], origins: tuple[str, ...], count: CountRefusal
    ) -> None:
        self.app = app
        self._origins = origins
        self._is_local = is_loopback(listens_on.lower())
        self._allowed = {host_name(name) for name in allowed}
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = self._checked(scope)
            for origin in Headers(scope=scope).getlist("origin"):
                self._check_origin(scope, origin, host)
        await self.app(scope, receive, send)

    def _checked(self, scope: Scope) -> Authority | None:
        """Return the host named by the request. Raises InvalidRequest and Forbidden."""
        hosts = Headers(scope=scope).getlist("host")
        if not hosts and scope["http_version"] == "1.0":
            return None
        host = parse_authority(hosts[0]) if len(hosts) == 1 else None
        if host is None:
            shown = ", ".join(hosts)[:80]
            raise InvalidRequest(f"The header Host must be one name with or without a port, got {shown!r}.")
        is_own = host.name in self._allowed or is_loopback(host.name)
        if not (is_own or (not self._is_local and (not self._allowed or is_address(host.name)))):
            message = (
                f"This server does not answer to the name '{host.name}'. If that is a name of it, start it with "
                f"--allowed-host {host.name}"
            )
            _refuse(scope, AccessRefusal.HOST, Forbidden(message, code="host_not_allowed"), self._count, host.name)
        return host

    def _check_origin(self, scope: Scope, origin: str, host: Authority | None) -> None:
        is_own = host is not None and is_same_origin(origin, scope["scheme"], host)
        if is_own or "*" in self._origins or origin in self._origins:
            return
        message = (
            f"Web pages of the origin {origin[:200]!r} may not use this server. To allow them, start it with "
            f"--cors-origin {origin[:200]}. If a proxy stands in front of it, let that pass on the header Host."
        )
        _refuse(scope, AccessRefusal.ORIGIN, Forbidden(message, code="origin_not_allowed"), self._count, origin)


_OPEN_PATHS = ("/health", "/ready", "/version", "/metrics", "/openapi.json")


class OpenPaths:
    """The paths that need no key: the operator's, unless all are guarded, and those of pages, which contain no data. A
    browser sends no key when it loads a page."""

    def __init__(self, pages: Pages, *, guard_all: bool) -> None:
        paths = {"/", *(route.path for route in pages.routes)}
        self._paths = frozenset(paths if guard_all else paths.union(_OPEN_PATHS))
        self._starts = tuple(path.partition("{")[0] for path in paths if "{" in path)

    def __call__(self, path: str) -> bool:
        return path in self._paths or path.startswith(self._starts)


# Rights for these routes and all routes below them. Every other route needs the right to use the model.
_RIGHTS: dict[str, Right] = {
    **dict.fromkeys(("/health", "/ready", "/version", "/openapi.json", "/v1/models"), Right(0)),
    **dict.fromkeys(("/metrics", "/debug", "/dashboard"), Right.WATCH),
    **dict.fromkeys(("/v1/load_lora_adapter", "/v1/unload_lora_adapter"), Right.ADAPTERS),
    "/admin": Right.KEYS,
}


def right_for(path: str) -> Right:
    return next((right for at, right in _RIGHTS.items() if path == at or path.startswith(f"{at}/")), Right.USE)


def key_in(headers: Headers) -> bytes:
    """Return the API key in the headers of a request as it was on the wire; empty if there is none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not value.strip():
        value = headers.get("x-api-key", "")
    return value.strip().encode("latin-1")


def names_clients(request: Request, keys: Keyring | None) -> bool:
    """Return whether the answer on a path that needs no key may name clients. It may if the request has a key with the
    right to watch, or if the server has no keys."""
    if keys is None:
        return True
    key = request.state.key or keys.find(key_in(request.headers))
    return key is not None and Right.WATCH in key.rights


class APIKeys:
    """Requires `Authorization: Bearer KEY` on all routes except the open ones.
    Clients of Anthropic's API send `x-api-key: KEY`.

    `scope["state"]` gets the `key`, its name as `key_name` and `client`, and its digest as `owner`.
    """

    def __init__(self, app: ASGIApp, *, keys: Keyring, is_open: OpenPaths, count: CountRefusal) -> None:
        self.app = app
        self._keys = keys
        self._is_open = is_open
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_open(scope["path"]):
            key = self._find(scope)
            if right_for(scope["path"]) not in key.rights:
                message = f"The role of the key '{key.name}' does not permit {scope['path'][:100]}."
                _refuse(scope, AccessRefusal.ROLE, Forbidden(message, code="role_not_allowed"), self._count, key.name)
            # The owner is not the name: after a restart, another key may have the same name.
            scope["state"].update(key=key, key_name=key.name, client=key.name, owner=key.digest.hex())
        await self.app(scope, receive, send)

    def _find(self, scope: Scope) -> Key:
        """Return the key of a request. Raises Unauthorized."""
        value = key_in(Headers(scope=scope))
        if not value:
            missing = Unauthorized("Please give your API key in the header 'Authorization: Bearer KEY'.")
            _refuse(scope, AccessRefusal.MISSING_KEY, missing, self._count)
        key = self._keys.find(value)
        if key is None:
            unknown = Unauthorized("The API key is not known to this server.")
            _refuse(scope, AccessRefusal.UNKNOWN_KEY, unknown, self._count)
        return key
