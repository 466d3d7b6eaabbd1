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
    ring = request.app.state.backend.keys
    (store,) = (source for source in ring.sources if isinstance(source, KeyStore))
    return json_response({"keys": await store.listed()})
