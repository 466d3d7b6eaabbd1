"""/debug/requests: the accounts of the last requests that ended, for people. No prompt or answer text."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from oaiserve.errors import NotFound
from oaiserve.record import Outcome
from oaiserve.routes.middleware import json_response
from oaiserve.routes.protocol import invalid, show
from oaiserve.routes.serving import serving_of
from oaiserve.routes.waterfall import page
from oaiserve.times import PHASES


async def recent_requests(request: Request) -> Response:
    """Newest first. The query may hold `slowest` (a phase: the longest in it first), `outcome`, `id` (how the request
    ids begin) and `limit`. Raises InvalidRequest."""
    query = request.query_params
    _check_names(query, "slowest", "outcome", "id", "limit")
    slowest = _one_of("slowest", query.get("slowest"), PHASES)
    outcome = _one_of("outcome", query.get("outcome"), tuple(Outcome))
    id_prefix, limit = query.get("id", ""), _limit(query.get("limit"))
    recent = serving_of(request).recent

    def render() -> Response:
        entries = recent.list(slowest=slowest, outcome=outcome, id_prefix=id_prefix, limit=limit)
        return json_response({"requests": entries})

    return await run_in_threadpool(render)


async def recent_request(request: Request) -> Response:
    """By the id of the header x-request-id. Text for those who prefer it, or say `format=text`. Raises NotFound for
    one that is not among the last."""
    _check_names(request.query_params, "format")
    asked = _one_of("format", request.query_params.get("format"), ("json", "text"))
    as_text = asked == "text" if asked is not None else prefers_text(request.headers.get("accept", ""))
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return PlainTextResponse(page(entry)) if as_text else json_response(entry)


async def closed(request: Request) -> Response:
    """In the place of this route and of the live page where they are not served. Raises NotFound."""
    raise NotFound(
        f"{request.url.path} shows other people's requests, so it is there only with an --api-key, or where --host is "
        "this machine alone, as in 127.0.0.1."
    )


def _check_names(query: QueryParams, *known: str) -> None:
    for name in query:
        if name not in known:
            raise invalid(name[:80], f"this route takes {', '.join(known)}")


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise invalid(name, f"must be one of {', '.join(allowed)}, got {show(value)}")
    return value


def _limit(value: str | None) -> int | None:
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 9 and int(value) > 0):
        raise invalid("limit", f"must be an integer >= 1, got {show(value)}")
    return int(value)


def prefers_text(accept: str) -> bool:
    """Whether an Accept header asks for text/plain rather than for JSON."""
    return _quality(accept, "text/plain") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """That of the most specific range that covers the type; 0: none does."""
    qualities: dict[str, float] = {}
    for item in accept.lower().split(","):
        media_range, *parameters = (part.strip() for part in item.split(";"))
        given = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
        try:
            qualities[media_range] = float(given[0]) if given else 1.0
        except ValueError:
            continue  # a range with a broken quality is none
    ranges = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    return next((qualities[media_range] for media_range in ranges if media_range in qualities), 0.0)
