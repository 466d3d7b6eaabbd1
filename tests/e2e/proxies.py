"""Reverse proxies: one with a path prefix, as where several servers share a host, and one for the text format."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from threading import Thread

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HOP_HEADERS = ("connection", "transfer-encoding", "keep-alive")  # not passed on


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    """Run the app of a proxy, and yield its URL."""
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()  # so that early requests wait until the proxy runs
        thread = Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def under_prefix(url: str, prefix: str) -> Iterator[str]:
    """Run the proxy for the server at `url`, and yield its URL. A request without the prefix gets a 404."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as app.state.http:
            yield

    async def pass_on(request: Request) -> Response:
        http = request.app.state.http
        headers = [pair for pair in request.headers.items() if pair[0] not in HOP_HEADERS]
        path = request.scope["raw_path"].decode().removeprefix(prefix)
        target = httpx.URL(path, query=request.scope["query_string"])
        asked = http.build_request(request.method, target, headers=headers, content=await request.body())
        answer = await http.send(asked, stream=True)
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
        response.raw_headers = [pair for pair in answer.headers.raw if pair[0].decode().lower() not in HOP_HEADERS]
        return response

    routes = [Route(f"{prefix}/{{path:path}}", pass_on, methods=["GET", "POST"])]
    with running(Starlette(routes=routes, lifespan=lifespan)) as proxy_url:
        yield f"{proxy_url}{prefix}"


@contextmanager
def text_format_proxy(url: str) -> Iterator[str]:
    """Run a proxy for the server at `url` that always requests /metrics in the text format, and yield its URL.

    Prometheus itself always requests OpenMetrics.
    """

    def pass_on(request: Request) -> Response:
        page = httpx.get(f"{url}{request.url.path}", headers={"accept": "text/plain"}, timeout=30)
        return Response(page.content, page.status_code, media_type=page.headers["content-type"])

    with running(Starlette(routes=[Route("/{path:path}", pass_on)])) as proxy_url:
        yield proxy_url
