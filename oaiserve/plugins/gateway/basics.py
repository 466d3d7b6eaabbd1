"""Routes of a front without a model of its own."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from oaiserve import __version__
from oaiserve.routes.door.middleware import json_response


async def health(request: Request) -> Response:
    return Response()


async def version(request: Request) -> Response:
    return json_response({"version": __version__})
