"""The pages and their files: those of oaiserve in `static/`, and other people's JavaScript in `vendor/`. The views and
files of other plug-ins are served like these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.errors import NotFound
from oaiserve.routes.operation import Operation
from oaiserve.routes.pages import Endpoint, Pages, View

_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_API = View(path="/docs", file="api.html", summary="The page about this API.")
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


def page_files(pages: Pages) -> Mapping[str, File]:
    """Return the files of all plug-ins by their names, and the views in their frame by their paths."""
    return _files((*pages.folders,), (*pages.views,), (*pages.parts,))


@cache
def _files(
    folders: tuple[Path, ...], views: tuple[View, ...], parts: tuple[tuple[str, str], ...]
) -> Mapping[str, File]:
    contents = {
        path.name: path.read_bytes() for folder in reversed(folders) for path in folder.iterdir() if path.is_file()
    }
    links = [f'<a href=".{view.path}" data-shows-requests>{escape(view.link)}</a>' for view in views if view.link]
    for name in ("frame.html", "chat.html"):
        contents[name] = contents[name].replace(b'<slot name="links"></slot>', "\n      ".join(links).encode())
    contents |= {view.path: _framed(view, parts, contents) for view in (*views, _API)}
    return {
        name: File(
            content,
            "text/html" if name.startswith("/") else _MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream"),
            f'"{sha256(content).hexdigest()[:32]}"',
        )
        for name, content in contents.items()
    }


def _framed(view: View, parts: Sequence[tuple[str, str]], contents: Mapping[str, bytes]) -> bytes:
    head, main = contents[view.file].decode().split("\n\n", 1)
    added = [contents[part].decode().split("\n\n", 1) for file, part in parts if file == view.file]
    _, top, *deeper = view.path.split("/")
    page = contents["frame.html"].decode().replace(f'href="./{top}"', f'href="./{top}" aria-current="page"')
    slots = {"head": [head, *(each[0] for each in added)], "main": [main], "parts": [each[1] for each in added]}
    for name, texts in slots.items():
        page = page.replace(f'<slot name="{name}"></slot>', "\n".join(texts))
    return (page.replace('"./', '"' + "../" * len(deeper)) if deeper else page).encode()


def _page(view: View) -> Endpoint:
    @Operation(summary=view.summary, group="Pages", answer="text/html")
    async def page(request: Request) -> Response:
        # The path as the client sent it: TidyPath changes only `path`.
        path = request.scope["raw_path"].decode("latin-1")
        num_slashes = len(path) - len(path.rstrip("/"))
        if num_slashes:  # The relative addresses in the page would resolve to something else.
            last = path.rstrip("/").rpartition("/")[2]
            return Response(status_code=308, headers={"location": f"{'../' * num_slashes}{last}"})
        return await file_response(request, view.path)

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
    file = (await run_in_threadpool(page_files, request.app.state.pages)).get(name)
    if file is None:
        raise NotFound(f"The pages have no file '{name[:128]}'.")
    headers = {**_HEADERS, "etag": file.etag, **more_headers}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


PAGES = Pages(
    routes=[
        Route(_API.path, _page(_API)),
        Route("/favicon.ico", favicon),
        Route("/dashboard/static/{name}", page_file),
    ],
    views=[
        View(path="/dashboard", file="live.html", summary="The live page.", link="Live"),
        View(path="/requests", file="requests.html", summary="The page with the last requests.", link="Requests"),
        View(path="/clients", file="clients.html", summary="The page with the last minutes by client.", link="Clients"),
        View(path="/requests/{request_id}", file="request.html", summary="The page of one request."),
    ],
    frame=_page,
    folders=[Path(__file__).with_name(name) for name in ("static", "vendor")],
    chat=chat,
    links={"docs": "docs", "page": "dashboard"},
    request="requests/",
)
