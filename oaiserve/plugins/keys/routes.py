"""/admin/keys: lists the stored keys for admins. `oaiserve keys` makes, changes and revokes them."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from oaiserve.plugins.keys.key_store import KeyStore
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.operation import Operation, closed

closed_route = closed("{path} shows stored keys, so it is there only with --stored-keys.")


@Operation(
    summary="The stored keys, with their limits and what they have used.", group="Debugging", answer="application/json"
)
async def list_keys(request: Request) -> Response:
    return await answer(request.app.state.key_store)


async def answer(store: KeyStore | None) -> Response:
    assert store is not None, "without a store, the route is closed"
    return json_response({"keys": await store.listed()})
