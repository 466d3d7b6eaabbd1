"""The inside of the server: /debug/requests has the accounts of the last ended requests, /debug/report the report of a
replica for routers.

None of them holds text of prompts or answers.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from oaiserve.errors import NotFound
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import Outcome
from oaiserve.facts.report import ROUTER_HEADER, Report
from oaiserve.facts.times import PHASES
from oaiserve.routes.middleware import json_response
from oaiserve.routes.open_requests import open_requests
from oaiserve.routes.operation import PRIVATE, Operation, Parameter, closed, read_query
from oaiserve.routes.serving import serving_of

closed_route = closed(
    f"{{path}} shows other people's requests, {PRIVATE}, or with --open-dashboard."
)  # and the live page


class RequestList(msgspec.Struct):
    """The accounts of ended requests, and the newest open ones."""

    requests: list[dict[str, Any]]
    open: list[OpenRow]


_LIST_QUERY = (
    Parameter("slowest", "The phase by which they are sorted instead, longest first.", PHASES),
    Parameter("outcome", "Only those that ended so.", tuple(Outcome)),
    Parameter("id", "Only those whose request id begins so."),
    Parameter("limit", "Most requests.", is_integer=True),
    Parameter("model", "Of a server with several models: the one whose process is asked."),
)


@Operation(
    summary="The accounts of the last requests, and the open ones, newest first.",
    group="Debugging",
    answer=RequestList,
    query=_LIST_QUERY,
)
async def recent_requests(request: Request) -> Response:
    asked = read_query(request.query_params, _LIST_QUERY)
    serving = serving_of(request)
    recent = serving.telemetry.recent

    def render() -> Response:
        entries = recent.list(
            slowest=asked["slowest"], outcome=asked["outcome"], id_prefix=asked["id"] or "", limit=asked["limit"]
        )
        return json_response(RequestList(entries, open_requests(serving)))

    return await run_in_threadpool(render)


@Operation(
    summary="The account of one of the last requests.",
    group="Debugging",
    answer="application/json",
    errors=(NotFound,),
)
async def recent_request(request: Request) -> Response:
    """Answer with the request of this id (header x-request-id). Raises NotFound."""
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).telemetry.recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return json_response(entry)


@Operation(
    summary="What a router learns of this server: its load, and the keys of the prompts in its prefix cache.",
    group="Debugging",
    answer=Report,
)
async def report(request: Request) -> Response:
    """Answer with the report of this moment. Its `keys` are integers of 64 bits, little-endian, in base64.

    Who guesses a prompt knows its keys. So where API keys are kept apart, only a trusted gateway gets them."""
    serving, engine = serving_of(request), serving_of(request).engine
    made = await run_in_threadpool(engine.report)
    models = (*serving.config.model_names, *(adapter.name for adapter in engine.adapters.served))
    shown = Report.of(made, is_ready=engine.is_ready, is_hung=bool(engine.hang), models=models)
    if not serving.config.server.shares_prefix_cache and ROUTER_HEADER not in request.headers:
        shown.keys = b""
    return json_response(shown)
