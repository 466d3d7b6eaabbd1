"""Pages of lists in OpenAI's form: a part of the list, with the ids of its first and last items."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from oaiserve.routes.intake.invalid import invalid, show

PAGE_PREFIX = "page_"  # Begins the `page` of Anthropic's lists of files. The id of the file before the page follows.
Item = TypeVar("Item")


class Page(msgspec.Struct, Generic[Item]):
    """A page of a list."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


def between(ids: Sequence[str], limit: int, after: str | None, before: str | None) -> tuple[range, bool]:
    """Return the places of at most `limit` items after or before an id, and whether there are more in that direction.
    Raises ValueError for an unknown id."""
    start = 0 if after is None else ids.index(after) + 1
    end = len(ids) if before is None else ids.index(before)
    shown = range(start, end)[:limit] if before is None else range(start, end)[-limit:]
    return shown, len(shown) < end - start


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
