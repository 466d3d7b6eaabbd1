"""The inside of the server: /debug/requests returns the accounts of recent requests, and /debug/report returns the
report of a replica for routers.

Neither contains text of prompts or answers.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oaiserve.errors import NotFound
from oaiserve.facts.open_row import OpenRow
from oaiserve.facts.record import Outcome
from oaiserve.facts.times import ALL_PHASES
from oaiserve.routes.door.middleware import json_response
from oaiserve.routes.open_requests import open_request, open_requests
from oaiserve.routes.operation import PRIVATE, Operation, Parameter, closed, read_query
from oaiserve.routes.serving import any_serving_of, serving_of
from oaiserve.telemetry.clients import WINDOW_SECONDS, ClientList
from oaiserve.wire.report import ROUTER_HEADER, Report

CLIENTS_SECONDS = 300  # the window of the list of clients, unless the query says otherwise
_WRITING_SECONDS = 2.0  # the longest wait for the accounts of requests that have ended

closed_route = closed(f"{{path}} shows other people's requests, {PRIVATE}, or with --open-dashboard.")


class RequestList(msgspec.Struct):
    """The accounts of ended requests, and the newest open requests."""

    requests: list[dict[str, Any]]
    open: list[OpenRow]


_LIST_QUERY = (
    Parameter("slowest", "The phase by which they are sorted instead, longest first.", ALL_PHASES),
    Parameter("outcome", "Only those with this outcome.", tuple(Outcome)),
    Parameter("failed", "Only those that failed or were rejected.", ("true", "false")),
    Parameter("slow", "Only those that took at least this many milliseconds.", is_integer=True),
    Parameter("client", "Only those of the API key with this name. Empty: only those without a key."),
    Parameter("model", "Only those for this model."),
    Parameter("route", "Only those of this route, such as /v1/chat/completions."),
    Parameter("id", "Only those whose request id or trace id begins with this."),
    Parameter("limit", "Maximum number of ended requests.", is_integer=True),
    Parameter("form", "row: the few fields that a list shows. whole: the whole account.", ("whole", "row")),
)


@Operation(
    summary="The accounts of the last requests, and the open ones, newest first.",
    group="Debugging",
    answer=RequestList,
    query=_LIST_QUERY,
)
async def recent_requests(request: Request) -> Response:
    """Answer with the matching requests. Filters by outcome leave out open requests."""
    query = read_query(request.query_params, _LIST_QUERY)
    serving = any_serving_of(request)
    recent = serving.telemetry.recent
    has_failed = query["failed"] == "true"
    config = serving.config
    model = config.model_name if query["model"] in config.accepted_names else query["model"]
    of = {"client": query["client"], "model": model, "route": query["route"]}

    def is_shown(row: OpenRow) -> bool:
        is_slow = row.elapsed_ns >= (query["slow"] or 0) * 1_000_000
        begins_so = row.request_id.startswith(query["id"] or "")
        return is_slow and begins_so and all(value in (None, getattr(row, name) or "") for name, value in of.items())

    def render() -> Response:
        entries = recent.list(
            slowest=query["slowest"],
            outcome=query["outcome"],
            failed=has_failed,
            slow_ms=query["slow"] or 0,
            id_prefix=query["id"] or "",
            limit=query["limit"],
            rows=query["form"] == "row",
            **of,
        )
        if has_failed or query["outcome"]:
            opened = []
        else:
            opened = [row for row in open_requests(serving) if is_shown(row)]
        return json_response(RequestList(entries, opened))

    return await run_in_threadpool(render)


@Operation(
    summary="The account of one of the last requests, or of an open one so far.",
    group="Debugging",
    answer="application/json",
    errors=(NotFound,),
)
async def recent_request(request: Request) -> Response:
    """Answer with the request of this id (header x-request-id) or this trace id. Raises NotFound."""
    request_id = request.path_params["request_id"]
    serving = any_serving_of(request)

    def find() -> dict[str, Any] | OpenRow | None:
        recent = serving.telemetry.recent
        if (found := open_request(serving, request_id) or recent.get(request_id)) is None:
            serving.telemetry.wait_for_queued(_WRITING_SECONDS)  # It may have ended just now.
            found = recent.get(request_id)
        return found

    entry = await run_in_threadpool(find)
    if entry is None:
        num_recent = serving.config.telemetry.recent_requests
        raise NotFound(
            f"There is no request '{request_id[:128]}' here. This server keeps the last {num_recent:,} that have ended "
            "(--recent-requests), none from before its start, and those that are open."
        )
    return json_response(entry)


CLIENTS_QUERY = (
    Parameter("seconds", "The length of the window until now.", is_integer=True, least=1, most=WINDOW_SECONDS),
)


@Operation(
    summary="What each client's requests of the last minutes got, waited for, and made others wait for.",
    group="Debugging",
    answer=ClientList,
    query=CLIENTS_QUERY,
)
async def recent_clients(request: Request) -> Response:
    """Answer with a row for each client. The client that made others wait the longest comes first."""
    seconds = read_query(request.query_params, CLIENTS_QUERY)["seconds"] or CLIENTS_SECONDS
    clients = any_serving_of(request).telemetry.clients
    return json_response(await run_in_threadpool(clients.last, seconds))


_SAMPLES_QUERY = (Parameter("after", "Only those with a higher number.", is_integer=True, least=0),)


@Operation(
    summary="The samples of the live page, one per second of the last minutes.",
    group="Debugging",
    answer="application/json",
    query=_SAMPLES_QUERY,
)
async def samples(request: Request) -> Response:
    """Answer with the samples, which a gateway adds up for its own live page."""
    after = read_query(request.query_params, _SAMPLES_QUERY)["after"] or 0
    samples = any_serving_of(request).telemetry.samples

    def render() -> Response:
        return json_response({"boundaries_seconds": samples.boundaries_seconds, "samples": samples.after(after)})

    return await run_in_threadpool(render)


@Operation(
    summary="A replica's report for routers: its load, and the keys of the prompts in its prefix cache.",
    group="Debugging",
    answer=Report,
)
async def report(request: Request) -> Response:
    """Answer with the current report. Its `keys` are integers of 64 bits, little-endian, in base64.

    Anyone who can guess a prompt can compute its keys. So if API keys are isolated from each other, only a trusted
    gateway gets the report.
    """
    serving = serving_of(request)
    engine = serving.engine
    reported = await run_in_threadpool(engine.report)
    config = serving.config
    models = (*config.model_names, *(adapter.name for adapter in engine.adapters.served))
    aliases = tuple(name for name in config.accepted_names if name not in models)
    shown = Report.of(reported, is_ready=engine.is_ready, is_hung=bool(engine.hang), models=models, aliases=aliases)
    if not config.shares_prefix_cache and ROUTER_HEADER not in request.headers:
        shown.keys = b""
    return json_response(shown)


def routes() -> list[Route]:
    """Return the routes that show everyone's requests."""
    return [
        Route("/debug/requests", recent_requests),
        Route("/debug/requests/{request_id}", recent_request),
        Route("/debug/clients", recent_clients),
        Route("/debug/samples", samples),
    ]
