"""The form of lists and times in Anthropic's API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

from oaiserve.errors import NotFound
from oaiserve.routes.answer.paging import PAGE_PREFIX
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.operation import Parameter

LIMIT = Parameter("limit", "How many. Default: 20.", is_integer=True, most=1000)
AFTER_ID = Parameter("after_id", "The id after which the page begins.")
BEFORE_ID = Parameter("before_id", "The id before which the page ends.")
PAGE = Parameter("page", "The `next_page` of the page before.")
BETA = Parameter("beta", "Is ignored.")

Item = TypeVar("Item")
# Takes a limit, and the id after which, or before which, the page begins.
Newest = Callable[[int, str | None, str | None], Awaitable[list[Item]]]


async def read_page(query: Mapping[str, Any], newest: Newest[Item], noun: str) -> tuple[list[Item], bool]:
    """Return the items of the page that a query selects, and whether there are more in its direction. Raises
    InvalidRequest."""
    limit = query["limit"] or 20
    edges = {name: edge for name in ("after_id", "before_id", "page") if (edge := query.get(name)) is not None}
    if len(edges) > 1:
        first, second, *_ = edges
        raise invalid(second, f"is not allowed with '{first}': a page is either after or before a {noun}")
    (param, edge), *_ = [*edges.items(), ("after_id", None)]
    if param == "page" and edge is not None:
        if not edge.startswith(PAGE_PREFIX):
            raise invalid(param, f"must be the 'next_page' of a list, got {show(edge)}")
        edge = edge.removeprefix(PAGE_PREFIX)
    is_before = param == "before_id"
    try:
        found = await newest(limit + 1, None if is_before else edge, edge if is_before else None)
    except NotFound:
        raise invalid(param, f"there is no {noun} {show(edge)}") from None
    return (found[-limit:] if is_before else found[:limit]), len(found) > limit


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
