"""Pages of lists in OpenAI's form: a part of the list, with the ids of its first and last items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from oaiserve.routes.intake.invalid import invalid, show

Item = TypeVar("Item")


class Page(msgspec.Struct, Generic[Item]):
    """A page of a list."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


AnyPage = TypeVar("AnyPage", bound=Page[Any])


def page_of(
    kind: type[AnyPage], items: list[Any], id_of: Callable[[Any], str], limit: int, after: str | None, noun: str = ""
) -> AnyPage:
    """Return the page of `limit` items that follow the item `after`. Raises InvalidRequest if there is no such item."""
    start = 0
    if after is not None:
        ids = [*map(id_of, items)]
        if after not in ids:
            raise invalid("after", f"there is no {noun}{show(after)} here")
        start = ids.index(after) + 1
    shown = items[start : start + limit]
    if shown:
        first_id = id_of(shown[0])
        last_id = id_of(shown[-1])
    else:
        first_id = None
        last_id = None
    return kind(shown, first_id, last_id, start + limit < len(items))
