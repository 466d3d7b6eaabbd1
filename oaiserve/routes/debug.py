"""/debug/requests: the accounts of the last requests that ended, for people. No prompt or answer text."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import NotFound
from oaiserve.routes.middleware import json_response
from oaiserve.routes.serving import serving_of


async def recent_requests(request: Request) -> Response:
    """Newest first."""
    recent = serving_of(request).recent
    return await run_in_threadpool(lambda: json_response({"requests": recent.list()}))


async def recent_request(request: Request) -> Response:
    """By the id of the header x-request-id. Raises NotFound for one that is not among the last."""
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return json_response(entry)
