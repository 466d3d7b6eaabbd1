"""The lists of all replicas: of models, where these have different ones, and of files and batches."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from oaiserve.routes.middleware import json_response
from oaiserve.routes.models import list_answer
from oaiserve.routes.pages import Page, page_of
from oaiserve.scale.gateway.upstream import BadAnswer, CutOff, Headers, Unreachable
from oaiserve.scale.gateway.watch import Watch
from oaiserve.scale.routers import Routers

MOST_PAGES, PAGE_ITEMS = 10, 100  # of a replica's list, with as many items as a page may have

Item = dict[str, Any]


class _List(msgspec.Struct):
    data: list[Item]
    has_more: bool = False


async def all_models(watch: Watch, routers: Routers, headers: Headers) -> list[Item] | Response:
    """Ask one replica of each set of models for its list, with a client's `headers`, and return all models, or a
    replica's refusal."""
    found: dict[str, Item] = {}
    headers = [
        header for header in headers if header[0] != b"anthropic-version"
    ]  # with it, the replica answers in pages
    for name in sorted(watch.joined - watch.silent):
        if (models := routers.models_of(name)) and found.keys() >= {*models}:
            continue
        listed = await _listed(watch, name, b"/v1/models", headers, {})
        if isinstance(listed, Response):  # it wants another key, most probably
            return listed
        for model in listed:
            found.setdefault(str(model.get("id")), model)
    return [*found.values()]


async def models_answer(watch: Watch, routers: Routers, scope: Scope, headers: Headers) -> Response:
    """Answer a request for the list of models with the models of all replicas."""
    models = await all_models(watch, routers, headers)
    return models if isinstance(models, Response) else list_answer(scope, models)


async def all_kept(watch: Watch, target: bytes, headers: Headers) -> Response:
    """Ask each replica for its list at a path, and answer with the page that the query of `target` means of them all.

    Replicas that refuse count only if all do. Raises InvalidRequest if nothing has the id `after`.
    """
    path, _, query = target.partition(b"?")
    fields = {"limit": "20"} | dict(parse_qsl(query.decode()))
    after, limit = fields.pop("after", None), PAGE_ITEMS
    if fields["limit"].isdigit() and 0 < int(fields["limit"]) <= PAGE_ITEMS:  # others are for a replica to refuse
        limit, fields["limit"] = int(fields["limit"]), str(PAGE_ITEMS)
    answers = [await _listed(watch, name, path, headers, fields) for name in sorted(watch.joined - watch.silent)]
    refusals = [answer for answer in answers if isinstance(answer, Response)]
    if refusals and len(refusals) == len(answers):
        return refusals[0]
    found = {str(item.get("id")): item for answer in answers if not isinstance(answer, Response) for item in answer}
    newest = sorted(found.values(), key=lambda item: -int(item.get("created_at") or 0))
    return json_response(page_of(Page[Item], newest, lambda item: str(item.get("id")), limit, after))


async def _listed(
    watch: Watch, name: str, path: bytes, headers: Headers, query: dict[str, str]
) -> list[Item] | Response:
    """Return the items of a replica's list, as far as they can be read, or its refusal."""
    items: list[Item] = []
    target = path + (b"?" if query else b"")
    for _ in range(MOST_PAGES):
        try:
            status, content = await watch.upstreams[name].get(target + urlencode(query).encode(), headers)
            if status != 200:
                return Response(content, status, media_type="application/json")
            page = msgspec.json.decode(content, type=_List)
        except (Unreachable, BadAnswer, CutOff, msgspec.MsgspecError):  # the others are there
            break
        items += page.data
        if not page.has_more or not items:
            break
        query = query | {"after": str(items[-1].get("id"))}
    return items
