"""The inside of the server: /debug/requests has the accounts of the last ended requests, /debug/report the report of a
replica for routers.

None of them holds text of prompts or answers.
"""

from __future__ import annotations

from typing import Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from oaiserve.errors import NotFound
from oaiserve.facts.record import Outcome
from oaiserve.facts.report import ROUTER_HEADER, Report
from oaiserve.facts.times import PHASES
from oaiserve.routes.middleware import json_response
from oaiserve.routes.operation import PRIVATE, Operation, Parameter, closed, read_query
from oaiserve.routes.serving import serving_of
from oaiserve.routes.waterfall import page

closed_route = closed(
    f"{{path}} shows other people's requests, {PRIVATE}, or with --open-dashboard."
)  # and the live page


_LIST_QUERY = (
    Parameter("slowest", "The phase by which they are sorted instead, longest first.", PHASES),
    Parameter("outcome", "Only those that ended so.", tuple(Outcome)),
    Parameter("id", "Only those whose request id begins so."),
    Parameter("limit", "Most requests.", is_integer=True),
    Parameter("model", "Of a server with several models: the one whose process is asked."),
)


@Operation(
    summary="The accounts of the last requests, newest first.",
    group="Debugging",
    answer="application/json",
    query=_LIST_QUERY,
)
async def recent_requests(request: Request) -> Response:
    asked = read_query(request.query_params, _LIST_QUERY)
    recent = serving_of(request).telemetry.recent

    def render() -> Response:
        entries = recent.list(
            slowest=asked["slowest"], outcome=asked["outcome"], id_prefix=asked["id"] or "", limit=asked["limit"]
        )
        return json_response({"requests": entries, "open": recent.open()})

    return await run_in_threadpool(render)


_REQUEST_QUERY = (Parameter("format", "Default: what the header Accept prefers.", ("json", "text")),)


@Operation(
    summary="The account of one of the last requests, as JSON or as a page of text.",
    group="Debugging",
    answer="application/json",
    alternative="text/plain",
    query=_REQUEST_QUERY,
    errors=(NotFound,),
)
async def recent_request(request: Request) -> Response:
    """Answer with the request of this id (header x-request-id), as text if the client prefers it. Raises NotFound."""
    asked = read_query(request.query_params, _REQUEST_QUERY)["format"]
    as_text = asked == "text" if asked is not None else prefers("text/plain", request.headers.get("accept", ""))
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).telemetry.recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return PlainTextResponse(page(entry)) if as_text else json_response(entry)


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
    models = (serving.config.model_name, *(adapter.name for adapter in engine.adapters.served))
    shown = Report.of(made, is_ready=engine.is_ready, is_hung=bool(engine.hang), models=models)
    if not serving.config.server.shares_prefix_cache and ROUTER_HEADER not in request.headers:
        shown.keys = b""
    return json_response(shown)


def prefers(kind: Literal["text/plain", "text/html"], accept: str) -> bool:
    """Return whether an Accept header prefers this text to JSON, by the most specific ranges that cover them."""
    qualities: dict[str, float] = {}
    for item in accept.lower().split(","):
        media_range, *parameters = (part.strip() for part in item.split(";"))
        given = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
        try:
            qualities[media_range] = float(given[0]) if given else 1.0
        except ValueError:
            continue  # a range with a malformed quality is ignored
    text, json = (
        next((qualities[each] for each in ranges if each in qualities), 0.0)
        for ranges in ((kind, "text/*", "*/*"), ("application/json", "application/*", "*/*"))
    )
    return text > json
