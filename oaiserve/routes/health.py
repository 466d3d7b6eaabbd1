"""The operator's routes: /health, /ready, /version and /metrics."""

from __future__ import annotations

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import Unavailable
from oaiserve.http.codings import page_response
from oaiserve.routes.door.access import names_clients
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.operation import Operation
from oaiserve.routes.serving import serving_of


class Version(msgspec.Struct):
    """The version of oaiserve."""

    version: str


@Operation(
    summary="200 while the process works, 503 once its engine has failed or while it hangs. The text of a 200 says if "
    "the engine is started again.",
    group="Server",
)
async def health(request: Request) -> Response:
    engine = serving_of(request).engine
    if (failure := engine.failure) is not None:
        raise Unavailable(f"The engine has stopped ({type(failure).__name__}). Please restart the server.")
    if engine.hang:
        raise Unavailable(f"The engine hangs in '{engine.hang}'. If it does not go on, please restart the server.")
    return Response(engine.pause, media_type="text/plain" if engine.pause else None)


@Operation(summary="200 while requests are welcome, else 503.", group="Server")
async def ready(request: Request) -> Response:
    await health(request)
    if not serving_of(request).engine.is_ready:
        raise Unavailable("The server is not ready for requests.")
    return Response()


@Operation(summary="The version.", group="Server", answer=Version)
async def version(request: Request) -> Response:
    return json_response(Version(serving_of(request).version))


@Operation(
    summary="The metrics, for Prometheus.",
    group="Server",
    answer="text/plain",
    alternatives=("application/openmetrics-text",),
)
async def metrics(request: Request) -> Response:
    render = serving_of(request).telemetry.render
    accepted = request.headers.get("accept", "")
    content, content_type = await run_in_threadpool(
        render, accepted, names_clients(request, request.app.state.backend.keys)
    )
    return await page_response(request, content, content_type)
