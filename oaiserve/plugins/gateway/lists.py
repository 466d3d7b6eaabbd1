"""Merges the lists of all replicas: models, if these differ, files and batches, requests, and clients. It also makes
the schema of a gateway's routes.

Answers of replicas are limited in time, bytes and items, and malformed items are left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from operator import itemgetter
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from oaiserve.errors import Unavailable
from oaiserve.plugins.gateway.routers import Routers
from oaiserve.plugins.gateway.sources import UNREADABLE
from oaiserve.plugins.gateway.upstream import Headers, NoAnswer, Upstream
from oaiserve.plugins.gateway.watch import Watch
from oaiserve.routes.answer.document import document_response
from oaiserve.routes.answer.paging import PAGE_PREFIX, Page, between, page_of
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.models import list_answer
from oaiserve.telemetry.clients import ClientList, summed
from oaiserve.wire.report import ROUTER_HEADER

REQUESTS_PATH = "/debug/requests"
CLIENTS_PATH = "/debug/clients"
SCHEMA_PATH = "/openapi.json"
MOST_PAGES = 10  # per list of a replica
PAGE_ITEMS = 100  # as many as a page may have
MOST_REQUESTS = 4096  # per replica
MOST_OF_ANTHROPIC = 1000  # items of a page in the form of Anthropic's API
MOST_MODELS = 2048  # items of a list of models, which has no pages
MOST_MODEL_BYTES = 2**20  # size of a replica's list of models
MOST_LIST_BYTES = 8 * 2**20  # size of all pages of a replica's list of files or batches
MOST_PAGE_BYTES = 2 * 2**20  # size of one page, which takes some milliseconds of the event loop
MOST_SCHEMA_BYTES = 2 * 2**20
LIST_SECONDS = 5.0  # time limit for the lists of a replica

Item = dict[str, Any]
UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**33)]


class _List(msgspec.Struct):
    data: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_MODELS)]
    has_more: bool = False


class _Requests(msgspec.Struct):
    requests: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_REQUESTS)]
    open: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_REQUESTS)]


class _Request(msgspec.Struct):
    """The fields of an ended or open request that are needed to merge lists."""

    received_unix_ns: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    phases: Annotated[list[Any], msgspec.Meta(max_length=100)] = []


class _Model(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    created: UnixSeconds = 0


class _Stored(_Model, kw_only=True):
    """A file or a batch."""

    created_at: UnixSeconds


class _OfAnthropic(_Model, kw_only=True):
    """A file or a batch of messages, in the form of Anthropic's API."""

    created_at: Annotated[datetime, msgspec.Meta(tz=True)]


Kind = TypeVar("Kind", bound=_Model)
Dated = TypeVar("Dated", _Stored, _OfAnthropic)
Query = dict[str, Any]  # Each value is a text, or a list of texts.


_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def credentials_in(request: Request) -> Headers:
    return [header for header in request.scope["headers"] if header[0] in (b"authorization", b"x-api-key")]


async def all_models(watch: Watch, routers: Routers, headers: Headers) -> list[Item] | Response:
    """Ask one replica of each set of models for its list, with a client's `headers`, and return all models, or a
    refusal if nobody lists any."""
    listed_models: dict[str, Item] = {}
    refusal: Response | None = None
    # With this header, the replica would answer in pages.
    headers = [header for header in headers if header[0] != b"anthropic-version"]
    for name in sorted(watch.joined - watch.silent):
        if (models := routers.models_of(name)) and listed_models.keys() >= {*models}:
            continue
        listed = await _listed(watch, name, _Model, b"/v1/models", headers, {}, MOST_MODEL_BYTES)
        if isinstance(listed, Response):  # It probably needs another key.
            refusal = listed
            continue
        for model, text in listed:
            with suppress(*UNREADABLE):
                listed_models.setdefault(model.id, _decode_fields(text) | msgspec.structs.asdict(model))
    return refusal if refusal is not None and not listed_models else [*listed_models.values()]


async def models_answer(watch: Watch, routers: Routers, scope: Scope, headers: Headers) -> Response:
    models = await all_models(watch, routers, headers)
    return models if isinstance(models, Response) else list_answer(scope, models)


async def all_kept(watch: Watch, target: bytes, headers: Headers) -> Response:
    """Request the list of each replica at a path, and answer with the page of all of them that the query of `target`
    selects.

    Replicas that refuse count only if all do. Raises InvalidRequest if nothing has the id `after`.
    """
    path, _, query = target.partition(b"?")
    fields: Query = {"limit": "20"} | dict(parse_qsl(query.decode(errors="replace")))
    after = fields.pop("after", None)
    limit = PAGE_ITEMS
    # Replicas refuse other limits.
    if fields["limit"] in {str(number) for number in range(1, PAGE_ITEMS + 1)}:
        limit = int(fields["limit"])
        fields["limit"] = str(PAGE_ITEMS)
    newest = await _newest(watch, _Stored, path, headers, fields)
    if isinstance(newest, Response):
        return newest
    page = page_of(Page[Any], newest, lambda both: both[0].id, limit, after)
    page.data = [text for _, text in page.data]
    return json_response(page)


async def all_of_anthropic(
    watch: Watch, target: bytes, headers: Headers, noun: str, *, has_next_page: bool
) -> Response:
    """Answer as `all_kept` does, in the form of Anthropic's API. A replica rejects invalid query parameters. Raises
    InvalidRequest if no item has the id that the page begins or ends at."""
    path, _, text = target.partition(b"?")
    query = QueryParams(text.decode(errors="replace"))
    fields: Query = {name: query.getlist(name) for name in query}
    limit = query.get("limit", "20")
    names = ("after_id", "before_id", *(["page"] if has_next_page else []))
    edges = {name: query[name].removeprefix(PAGE_PREFIX) for name in names if name in query}
    is_right = limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= MOST_OF_ANTHROPIC and len(edges) < 2
    if is_right and "ids[]" not in query and query.get("page", PAGE_PREFIX).startswith(PAGE_PREFIX):
        fields = {name: each for name, each in fields.items() if name not in edges} | {"limit": str(PAGE_ITEMS)}
    newest = await _newest(watch, _OfAnthropic, path, headers, fields, "after_id")
    if isinstance(newest, Response):
        return newest
    ids = [item.id for item, _ in newest]
    before = edges.get("before_id")
    try:
        shown, has_more = between(ids, int(limit), edges.get("after_id", edges.get("page")), before)
    except ValueError:
        (param, edge), *_ = edges.items()
        raise invalid(param, f"there is no {noun} {show(edge)}") from None
    first, last = (ids[shown[0]], ids[shown[-1]]) if shown else (None, None)
    data = [newest[number][1] for number in shown]
    page: Item = {"data": data, "first_id": first, "last_id": last, "has_more": has_more}
    if has_next_page:
        page["next_page"] = f"{PAGE_PREFIX}{last}" if has_more and before is None else None
    return json_response(page)


async def _newest(
    watch: Watch, kind: type[Dated], path: bytes, headers: Headers, query: Query, cursor: str = "after"
) -> list[tuple[Dated, msgspec.Raw]] | Response:
    """Return the items of all replicas' lists at a path, newest first, or a refusal if all replicas refuse."""
    names = sorted(watch.joined - watch.silent)
    answers = await asyncio.gather(
        *(_listed(watch, name, kind, path, headers, query, MOST_LIST_BYTES, cursor) for name in names)
    )
    refusals = [answer for answer in answers if isinstance(answer, Response)]
    if refusals and len(refusals) == len(answers):
        return refusals[0]
    by_id = {one.id: (one, text) for answer in answers if not isinstance(answer, Response) for one, text in answer}
    return sorted(by_id.values(), key=lambda both: both[0].created_at, reverse=True)


async def schema_answer(watch: Watch, lacks: Callable[[str], bool], headers: Headers) -> Response:
    """Answer with the schema of the first replica that sends one, without the paths that a gateway lacks. If replicas
    only refuse, answer with a refusal."""
    refusal: Response | None = None
    accepted = dict(headers).get(b"accept", b"").decode("latin-1")
    for name in sorted(watch.joined - watch.silent):
        with suppress(NoAnswer, KeyError, *UNREADABLE):
            upstream = watch.upstreams[name]
            status, content = await upstream.get(SCHEMA_PATH.encode(), headers, MOST_SCHEMA_BYTES, LIST_SECONDS)
            if status >= 400:
                refusal = Response(content, status, media_type="application/json")
                continue
            schema = _decode_fields(content)
            paths = _decode_fields(schema["paths"])
            # The pages are the gateway's own.
            own_paths = {path: text for path, text in paths.items() if path.startswith("/dashboard") or not lacks(path)}
            return document_response(msgspec.json.encode(schema | {"paths": own_paths}), accepted)
    if refusal is None:
        raise Unavailable("No replica sends its schema; try again later.", retry_after_seconds=5)
    return refusal


Ask = Callable[[str], Awaitable[Mapping[int, bytes] | Response]]  # asks all replicas for a path


async def all_requests(ask: Ask, query: str) -> Response:
    """Request the last requests of each replica, and answer with all of them, each with the number of its `replica`. If
    all replicas refuse, answer with a refusal."""
    if "limit" not in dict(parse_qsl(query)):  # A replica may have more than the gateway reads.
        query = f"{query}&limit={MOST_REQUESTS}" if query else f"limit={MOST_REQUESTS}"
    answers = await ask(f"{REQUESTS_PATH}?{query}")
    if isinstance(answers, Response):
        return answers
    return await asyncio.to_thread(_merged, answers, dict(parse_qsl(query)))


async def all_clients(ask: Ask, query: str) -> Response:
    """Request the clients of each replica, and answer with their sums. If all replicas refuse, answer with a
    refusal."""
    answers = await ask(f"{CLIENTS_PATH}?{query}")
    if isinstance(answers, Response):
        return answers
    found = []
    for content in answers.values():
        with suppress(*UNREADABLE):
            found.append(msgspec.json.decode(content, type=ClientList))
    seconds = max((one.seconds for one in found), default=0)
    return json_response(ClientList(seconds, summed(row for one in found for row in one.clients)))


async def answers_of_all(watch: Watch, target: str, headers: Headers) -> Mapping[int, bytes] | Response:
    """Request a path of each replica with a client's `headers`, and return the bodies of the successful answers that
    come in time, by the replicas' numbers. If all replicas refuse, return a refusal."""
    upstreams = [watch.upstreams[name] for name in sorted(watch.joined - watch.silent)]
    headers = [*headers, (ROUTER_HEADER.encode(), b"1")]

    async def answer_of(upstream: Upstream) -> tuple[int, bytes] | None:
        with suppress(NoAnswer):
            return await upstream.get(target.encode(), headers, MOST_LIST_BYTES, LIST_SECONDS)
        return None

    found = await asyncio.gather(*map(answer_of, upstreams))
    answers = {up.number: each for up, each in zip(upstreams, found, strict=True) if each is not None}
    bodies = {number: content for number, (status, content) in answers.items() if status == 200}
    if answers and not bodies:
        status, content = next(iter(answers.values()))
        return Response(content, status, media_type="application/json")
    return bodies


def _merged(answers: Mapping[int, bytes], fields: Mapping[str, str]) -> Response:
    merged: dict[str, list[tuple[float, Item]]] = {"requests": [], "open": []}
    for number, content in answers.items():
        try:
            answer = msgspec.json.decode(content, type=_Requests)
        except UNREADABLE:
            continue
        for name, rows in merged.items():
            for text in getattr(answer, name):
                with suppress(*UNREADABLE):
                    rank = _rank(msgspec.json.decode(text, type=_Request), fields.get("slowest"))
                    rows.append((rank, _decode_fields(text) | {"replica": number}))
    limit = int(text) if (text := fields.get("limit", "")).isdecimal() and len(text) <= 9 else None
    shown = {name: [row for _, row in sorted(rows, key=itemgetter(0))] for name, rows in merged.items()}
    return json_response({"requests": shown["requests"][:limit], "open": shown["open"]})


def _rank(request: _Request, slowest: str | None) -> float:
    """Return the sort key of a request: newest first, or with `slowest`, longest in that phase first."""
    if slowest is not None:
        for phase in request.phases:
            match phase:
                case {"name": str(name), "duration_ns": int(duration_ns)} | [str(name), int(duration_ns), *_]:
                    if name == slowest:
                        return -duration_ns
    return -request.received_unix_ns


async def _listed(
    watch: Watch,
    name: str,
    kind: type[Kind],
    path: bytes,
    headers: Headers,
    query: Query,
    most_bytes: int,
    cursor: str = "after",
) -> list[tuple[Kind, msgspec.Raw]] | Response:
    """Return the items of a replica's list that arrive in time and can be read, or its refusal."""
    items: list[tuple[Kind, msgspec.Raw]] = []
    target = path + (b"?" if query else b"")
    with suppress(TimeoutError, NoAnswer, KeyError, *UNREADABLE):  # Other replicas are enough.
        async with asyncio.timeout(LIST_SECONDS):
            for _ in range(MOST_PAGES):
                upstream = watch.upstreams[name]
                status, content = await upstream.get(
                    target + urlencode(query, doseq=True).encode(), headers, min(most_bytes, MOST_PAGE_BYTES)
                )
                if status >= 400:
                    return Response(content, status, media_type="application/json")
                most_bytes -= len(content)
                page = msgspec.json.decode(content, type=_List)
                new = _readable(page.data, kind)
                items += new
                if not page.has_more or not new:
                    break
                query = query | {cursor: new[-1][0].id}
    return items


def _readable(texts: Iterable[msgspec.Raw], kind: type[Kind]) -> list[tuple[Kind, msgspec.Raw]]:
    items = []
    for text in texts:
        with suppress(*UNREADABLE):
            items.append((msgspec.json.decode(text, type=kind), text))
    return items
