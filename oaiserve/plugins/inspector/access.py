"""Restricts access to the stored prompts and answers: only the server's owner may read them."""

from __future__ import annotations

from starlette.requests import Request

from oaiserve.errors import Forbidden
from oaiserve.hosts import is_loopback
from oaiserve.http.keys import Key, Keyring, Right
from oaiserve.routes.door.backend import Backend
from oaiserve.wire.routing_decision import FORWARDED_HEADER, HOPS_HEADER

# Proxies add these headers to requests that they forward.
_FORWARDED = ("forwarded", "x-real-ip", FORWARDED_HEADER)
_WHY = "shows what others wrote, so it answers only"


def check_owner(request: Request) -> None:
    """Raise Forbidden unless the request comes from the server's owner: with the owner's key or, if there are no
    keys, from this machine to a server that listens only on loopback."""
    backend: Backend = request.app.state.backend
    path = request.scope["path"][:200]
    if backend.keys is not None:
        key: Key | None = request.state.key
        if key is None or not _is_owners(key, backend, backend.keys):
            raise Forbidden(
                f"{path} {_WHY} to a key with the role admin (oaiserve keys add NAME --role admin) or, on a server "
                "with a single key, to that --api-key.",
                code="not_the_owner",
            )
    elif not (is_loopback(backend.config.server.host.lower()) and _is_from_this_machine(request)):
        raise Forbidden(
            f"{path} {_WHY} to this machine, on a server for this machine only (--host 127.0.0.1). To read it from "
            "elsewhere or through a gateway, start the server with an --api-key.",
            code="not_the_owner",
        )


def may_read(request: Request) -> bool:
    """Return whether the request comes from the server's owner."""
    try:
        check_owner(request)
    except Forbidden:
        return False
    return True


def _is_owners(key: Key, backend: Backend, ring: Keyring) -> bool:
    server = backend.config.server
    is_only_one = len(server.api_key) == 1 and not (server.api_key_file or ring.sources)
    return Right.KEYS in key.rights or (is_only_one and key.name == "key-1")


def _is_from_this_machine(request: Request) -> bool:
    """Return whether all addresses of a request are this machine's: the address of its connection, and those that
    proxies added. No gateway is trusted to report the sender of a request."""
    if HOPS_HEADER in request.headers:
        return False
    addresses = [request.client.host if request.client is not None else ""]
    for value in request.headers.getlist("x-forwarded-for"):
        addresses += [address.strip() for address in value.split(",")]
    is_forwarded = any(name in request.headers for name in _FORWARDED)
    return not is_forwarded and all(is_loopback(address) for address in addresses)
