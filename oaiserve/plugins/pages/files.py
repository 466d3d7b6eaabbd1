"""The pages and their files: those of oaiserve in `static/`, and other people's JavaScript in `vendor/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.errors import NotFound
from oaiserve.routes.operation import Operation
from oaiserve.routes.pages import Pages

_FOLDERS = ("static", "vendor")
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


class File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


@cache
def page_files() -> Mapping[str, File]:
    by_name = {}
    package = files("oaiserve.plugins.pages")
    frame = package.joinpath("static/frame.html").read_text()
    for path in (path for folder in _FOLDERS for path in package.joinpath(folder).iterdir()):
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


def _page(file: str, summary: str) -> Callable[[Request], Awaitable[Response]]:
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


async def chat(request: Request) -> Response:
    return await file_response(request, "chat.html", {"vary": "accept"})


async def file_response(request: Request, name: str, more_headers: Mapping[str, str] = _NO_HEADERS) -> Response:
    """Answer with a file of the pages, or with 304 if the browser has it. Raises NotFound."""
    file = (await run_in_threadpool(page_files)).get(name)
    if file is None:
        raise NotFound(f"The pages have no file '{name[:128]}'.")
    headers = {**_HEADERS, "etag": file.etag, **more_headers}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


PAGES = Pages(
    routes=[
        Route("/docs", _page("api.html", "The page about this API.")),
        Route("/favicon.ico", favicon),
        Route("/dashboard/static/{name}", page_file),
    ],
    of_requests=[
        Route("/dashboard", _page("live.html", "The live page.")),
        Route("/requests", _page("requests.html", "The page with the last requests.")),
        Route("/requests/{request_id}", _page("request.html", "The page of one request.")),
    ],
    chat=chat,
    links={"docs": "docs", "page": "dashboard"},
    request="requests/",
)
