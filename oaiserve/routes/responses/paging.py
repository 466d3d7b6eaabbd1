"""Pages of stored items, which several routes list."""

from __future__ import annotations

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.operation import Parameter
from oaiserve.routes.responses.items import Item

stored_items = msgspec.json.Decoder(list[Item])
MAX_LISTED = 100  # OpenAI's limit and default
LISTED = 20
ORDER = Parameter("order", "asc has the first item first. Default: desc.", allowed=("asc", "desc"))
LIMIT = Parameter("limit", f"How many items. Default: {LISTED}.", is_integer=True, most=MAX_LISTED)
AFTER = Parameter("after", "The id of the item behind which to begin.")


class ItemPage(msgspec.Struct):
    """A page of items."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


async def page(request: Request, content: bytes) -> Response:
    """Answer with the page of the items in `content` that the query of the request asks for."""
    query = request.query_params
    order = ORDER.value(query.get(ORDER.name, "desc"))
    limit = LIMIT.value(query.get(LIMIT.name, f"{LISTED}"))
    shown = await run_in_threadpool(_page, content, order, limit, query.get(AFTER.name))
    return Response(shown, media_type="application/json")


def _page(content: bytes, order: str, limit: int, after: str | None) -> bytes:
    items = stored_items.decode(content)
    if order == "desc":
        items.reverse()
    start = 0
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise invalid("after", f"there is no item {show(after)} here")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    first_id, last_id = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return msgspec.json.encode(ItemPage(shown, first_id, last_id, has_more=start + limit < len(items)))
