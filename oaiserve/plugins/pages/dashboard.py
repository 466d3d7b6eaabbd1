"""The pages, their files, and the feed of the live page. The pages hold no data, and the feed holds no text of
requests.

A page needs no API key, because a browser cannot send one when it opens a page. The page asks its user for the key and
sends it with everything else that it loads. All addresses in a page are relative, so a proxy may serve it under a
prefix.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from oaiserve.errors import NotFound, Overloaded
from oaiserve.http.codings import qualities
from oaiserve.plugins.pages.feed import Feed
from oaiserve.routes.answer import sse
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.open_requests import open_requests
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import Serving, serving_of

if TYPE_CHECKING:
    from oaiserve.config import ServerOptions

MOST_REQUESTS = 30  # rows of the waterfall
LAST_SAMPLES = 4  # samples in an update
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
# The pages that are shown in frame.html, with the link there that is theirs.
_FRAMED = {"live.html": "dashboard", "requests.html": "requests", "request.html": "requests", "api.html": "docs"}
_HEADERS = {
    "cache-control": "no-cache",  # A browser may keep a file, but must check by its etag whether it has changed.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
}
_NO_HEADERS: Mapping[str, str] = {}
_FEED_HEADERS = {**sse.HEADERS, "cache-control": "no-store"}


class File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, File]:
    by_name = {}
    folder = files("oaiserve.plugins.pages").joinpath("static")
    frame = folder.joinpath("frame.html").read_text()
    for path in folder.iterdir():
        suffix = path.name[path.name.rindex(".") :]
        content = path.read_bytes()
        if path.name in _FRAMED:
            content = _framed(frame, content.decode(), _FRAMED[path.name]).encode()
        if path.name == "request.html":  # Its address is one level deeper.
            content = content.replace(b'"./', b'"../')
        by_name[path.name] = File(content, _MEDIA_TYPES[suffix], f'"{sha256(content).hexdigest()[:32]}"')
    return by_name


def _framed(frame: str, page: str, link: str) -> str:
    head, main = page.split("\n\n", 1)
    frame = frame.replace(f'href="./{link}"', f'href="./{link}" aria-current="page"')
    return frame.replace('<slot name="head"></slot>', head).replace('<slot name="main"></slot>', main)


class Root(msgspec.Struct):
    """The name and version of this server, and relative links, because a proxy may serve it under a prefix. A server
    that shows no requests has no `page` link."""

    name: str
    links: dict[str, str]
    needs_key: bool
    version: str | UnsetType = UNSET  # With --guard-all, only clients with a key see it.


@Operation(summary="The chat page for browsers; others get links.", group="Pages", answer=Root, alternative="text/html")
async def root(request: Request) -> Response:
    serving = serving_of(request)
    has_chat = serving.task == "generate"
    return await answer_root(request, serving.config.server, serving.version, has_chat=has_chat, has_schema=True)


async def answer_root(
    request: Request, server: ServerOptions, version: str, *, has_chat: bool = True, has_schema: bool = False
) -> Response:
    """Answer a browser with the chat page, or redirect it to another page. Other clients get the `Root`."""
    if prefers_html(request.headers.get("accept", "")):
        if has_chat:
            return await file_response(request, "chat.html", {"vary": "accept"})
        to = "dashboard" if server.shows_dashboard else "docs"
        return Response(status_code=307, headers={"location": to, "vary": "accept", "cache-control": "no-store"})
    links = {"api": "v1", "models": "v1/models", "health": "health", "metrics": "metrics", "docs": "docs"}
    links |= {"schema": "openapi.json"} if has_schema else {}
    links |= {"page": "dashboard"} if server.shows_dashboard else {}
    document = Root("oaiserve", links, server.needs_key, UNSET if server.guard_all else version)
    return json_response(document, headers={"vary": "accept", "cache-control": "no-store"})


def prefers_html(accept: str) -> bool:
    """Return whether an Accept header prefers HTML to JSON, by the most specific ranges that cover them."""
    found = qualities(accept)
    html, json = (
        next((found[each] for each in ranges if each in found), 0.0)
        for ranges in (("text/html", "text/*", "*/*"), ("application/json", "application/*", "*/*"))
    )
    return html > json


def document_response(document: bytes, accept: str) -> Response:
    if prefers_html(accept):
        shown = msgspec.json.format(document, indent=2)
    else:
        shown = document
    return Response(shown, media_type="application/json", headers={"vary": "accept"})


Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]


def page_routes(closed: Endpoint | None) -> list[Route]:
    """Return the routes of all pages except /, and of their files. Unless it is None, `closed` replaces the pages that
    show requests."""
    return [
        Route("/dashboard", closed or _page("live.html", "The live page.")),
        Route("/requests", closed or _page("requests.html", "The page with the last requests.")),
        Route("/requests/{request_id}", closed or _page("request.html", "The page of one request.")),
        Route("/docs", _page("api.html", "The page about this API.")),
        Route("/favicon.ico", favicon),
        Route("/dashboard/static/{name}", page_file),
    ]


def _page(file: str, summary: str) -> Endpoint:
    @Operation(summary=summary, group="Pages", answer="text/html")
    async def page(request: Request) -> Response:
        # The path as the client sent it: TidyPath changes only `path`.
        path = request.scope["raw_path"].decode("latin-1")
        num_slashes = len(path) - len(path.rstrip("/"))
        if num_slashes:  # The relative addresses in the page would resolve to something else.
            last = path.rstrip("/").rpartition("/")[2]
            return Response(status_code=308, headers={"location": f"{'../' * num_slashes}{last}"})
        return await file_response(request, file)

    return page


@Operation(summary="The icon of the pages.", group="Pages", answer="image/svg+xml")
async def favicon(request: Request) -> Response:
    return await file_response(request, "icon.svg")


@Operation(summary="A file of a page.", group="Pages", answer="*/*", errors=(NotFound,))
async def page_file(request: Request) -> Response:
    """Answer with a file of the pages. Raises NotFound."""
    return await file_response(request, request.path_params["name"])


async def file_response(request: Request, name: str, more_headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """Answer with a file of the pages, or with 304 if the browser has it. Raises NotFound."""
    file = (await run_in_threadpool(page_files)).get(name)
    if file is None:
        raise NotFound(f"The pages have no file '{name[:128]}'.")
    headers = {**_HEADERS, "etag": file.etag, **more_headers}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


@Operation(
    summary="The feed of the live page: server-sent events, about one a second.",
    group="Pages",
    answer="text/event-stream",
    errors=(Overloaded,),
)
async def feed(request: Request) -> Response:
    """Stream the event `hello` once, with the last minutes, and then `update` about once a second. Raises
    Overloaded."""
    serving = serving_of(request)
    return feed_response(request, serving.feed, _events(serving))


def feed_response(request: Request, feed: Feed, events: AsyncIterator[bytes]) -> Response:
    if request.method == "HEAD":  # The answer would never end.
        return Response(headers=_FEED_HEADERS)
    return _FeedResponse(feed, events)


class _FeedResponse(StreamingResponse):
    """A response that holds a place among the viewers until its end."""

    def __init__(self, feed: Feed, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, headers=_FEED_HEADERS)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.viewer():
            await super().__call__(scope, receive, send)


async def _events(serving: Serving) -> AsyncIterator[bytes]:
    yield await run_in_threadpool(_hello, serving)
    while serving.engine.is_ready:  # a server that shuts down does not wait for viewers
        yield await serving.feed.next()


def _hello(serving: Serving) -> bytes:
    data = {
        "model": serving.config.model_name,
        "version": serving.version,
        "boundaries_seconds": serving.telemetry.live.boundaries_seconds,
        **_state(serving, serving.telemetry.live.after(0)),
    }
    return sse.event(msgspec.json.encode(data), "hello")


def update(serving: Serving) -> bytes:
    """Return the message for all viewers. It repeats the last few samples, in case a viewer missed one; viewers ignore
    samples they already have."""
    return sse.event(msgspec.json.encode(_state(serving, serving.telemetry.live.after(0)[-LAST_SAMPLES:])), "update")


def _state(serving: Serving, samples: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples": samples,
        "requests": serving.telemetry.recent.list(limit=MOST_REQUESTS, rows=True),
        "open": open_requests(serving),
        "costs": serving.telemetry.live.costs(),
    }
