"""A reverse proxy with a path prefix, as where several servers share a host."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import httpx
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oaiserve.config import ServerOptions
from tests.serving import RunningServer

OPTIONS = ServerOptions(drain_timeout_seconds=0)
HOP_HEADERS = ("connection", "transfer-encoding", "keep-alive")  # not passed on


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
        request_to_server = http.build_request(request.method, target, headers=headers, content=await request.body())
        answer = await http.send(request_to_server, stream=True)
        response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
        response.raw_headers = [pair for pair in answer.headers.raw if pair[0].decode().lower() not in HOP_HEADERS]
        return response

    routes = [Route(f"{prefix}/{{path:path}}", pass_on, methods=["GET", "POST"])]
    with RunningServer(Starlette(routes=routes, lifespan=lifespan), OPTIONS) as proxy:
        yield f"{proxy.url}{prefix}"
