"""Requests that a server sends to its own routes, instead of a client that has left or was never there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope

from oaiserve.http.keys import Keyring
from oaiserve.routes.door.middleware import request_ids


def own_scope(
    app: Starlette,
    path: str,
    token_hex: Callable[[int], str],
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
    extensions: Mapping[str, Any] | None = None,
) -> Scope:
    """Return the ASGI scope of a POST request with JSON. Its state has new ids, and no owner yet."""
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode(), "root_path": "", "query_string": b""}
    scope |= {"headers": [(b"content-type", b"application/json"), *headers]}
    scope |= {"extensions": dict(extensions or {}), "app": app, "server": None}
    scope["state"] = request_ids(scope, token_hex) | {"key": None, "key_name": None}
    return scope


def send_for(scope: Scope, owner: str, keys: Keyring | None) -> bool:
    """Give a request the key of its owner, who is named by the key's digest. Return False if the key is no longer
    valid."""
    state = scope["state"]
    state["owner"] = owner
    if keys is None:
        return True
    key = keys.of_digest(bytes.fromhex(owner))
    if key is None:
        return False
    state |= {"key": key, "key_name": key.name, "client": key.name}
    return True


def receiving(body: bytes) -> Receive:
    """Return an ASGI `receive` for this body. No client can leave, so later calls never return."""
    is_received = False

    async def receive() -> Message:
        nonlocal is_received
        if is_received:
            await asyncio.Event().wait()
        is_received = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive
