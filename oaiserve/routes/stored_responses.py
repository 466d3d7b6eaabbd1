"""The routes of /v1/responses/{response_id}, which read and delete what was stored. They make no records."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import InvalidRequest, NotFound
from oaiserve.response_store import StoredResponse
from oaiserve.routes.middleware import json_response
from oaiserve.routes.protocol import invalid, show
from oaiserve.routes.response_items import Item
from oaiserve.routes.serving import serving_of

MAX_LISTED = 100  # OpenAI's limit and default
LISTED = 20
_items = msgspec.json.Decoder(list[Item])


async def retrieve(request: Request) -> Response:
    if request.query_params.get("stream", "").lower() in ("true", "1"):
        raise invalid("stream", "the events of a stored response are not kept. Read it without 'stream'")
    stored = await _stored(request)
    return Response(stored.response, media_type="application/json")


async def delete(request: Request) -> Response:
    response_id = request.path_params["response_id"]
    if not await serving_of(request).responses.delete(request.state.owner, response_id):
        _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> Response:
    """Answer with the input of the response, newest first. What it has from earlier responses is theirs."""
    query = request.query_params
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be 'asc' or 'desc', got {show(order)}")
    limit = query.get("limit", str(LISTED))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= MAX_LISTED):
        raise invalid("limit", f"must be an integer from 1 to {MAX_LISTED}, got {show(limit)}")
    stored = await _stored(request)
    content = await run_in_threadpool(_page, stored.input_items, order, int(limit), query.get("after"))
    return Response(content, media_type="application/json")


async def cancel(request: Request) -> Response:
    await _stored(request)
    raise InvalidRequest("Only a response that is made in the background can be cancelled, and this server makes none.")


def _page(content: bytes, order: str, limit: int, after: str | None) -> bytes:
    items = _items.decode(content)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"there is no input item {show(after)} in this response")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    page: dict[str, Any] = {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }
    return msgspec.json.encode(page)


async def _stored(request: Request) -> StoredResponse:
    response_id = request.path_params["response_id"]
    stored = await serving_of(request).responses.get(request.state.owner, response_id)
    if stored is None:
        _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NoReturn:
    raise NotFound(
        f"There is no response {show(response_id)}: it was not stored, was deleted, or was stored too long ago.",
        param="response_id",
    )
