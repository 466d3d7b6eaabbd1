"""The inside of the server: /debug/requests has the accounts of the last ended requests, /debug/profile a trace of the
next engine steps, /debug/report the report of a replica for routers.

None of them holds text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response

from oaiserve.errors import Conflict, NotFound, RequestTimeout, Unavailable
from oaiserve.facts.record import Outcome, ProfileRecording
from oaiserve.facts.report import Report
from oaiserve.facts.times import PHASES
from oaiserve.files import private
from oaiserve.routes.accounts import AccountList, WholeAccount
from oaiserve.routes.middleware import json_response
from oaiserve.routes.operation import PRIVATE, Operation, Parameter, closed, read_query
from oaiserve.routes.serving import serving_of
from oaiserve.routes.waterfall import page

logger = logging.getLogger(__name__)

closed_route = closed(f"{{path}} shows other people's requests, {PRIVATE}")  # these, and the live page
POLL_SECONDS = 0.2  # how often a profile checks that its client is still connected
MOST_STEPS, MOST_SECONDS = 1000, 600


_LIST_QUERY = (
    Parameter("slowest", "The phase by which they are sorted instead, longest first.", PHASES),
    Parameter("outcome", "Only those that ended so.", tuple(Outcome)),
    Parameter("id", "Only those whose request id begins so."),
    Parameter("limit", "Most requests.", is_integer=True),
)


@Operation(
    summary="The accounts of the last requests, newest first.", group="Debugging", answer=AccountList, query=_LIST_QUERY
)
async def recent_requests(request: Request) -> Response:
    asked = read_query(request.query_params, _LIST_QUERY)
    recent = serving_of(request).recent

    def render() -> Response:
        entries = recent.list(
            slowest=asked["slowest"], outcome=asked["outcome"], id_prefix=asked["id"] or "", limit=asked["limit"]
        )
        return json_response({"requests": entries})

    return await run_in_threadpool(render)


_REQUEST_QUERY = (Parameter("format", "Default: what the header Accept prefers.", ("json", "text")),)


@Operation(
    summary="The account of one of the last requests, as JSON or as a page of text.",
    group="Debugging",
    answer=WholeAccount,
    alternative="text/plain",
    query=_REQUEST_QUERY,
    errors=(NotFound,),
)
async def recent_request(request: Request) -> Response:
    """Answer with the request of this id (header x-request-id), as text if the client prefers it. Raises NotFound."""
    asked = read_query(request.query_params, _REQUEST_QUERY)["format"]
    as_text = asked == "text" if asked is not None else prefers_text(request.headers.get("accept", ""))
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return PlainTextResponse(page(entry)) if as_text else json_response(entry)


_PROFILE_QUERY = (
    Parameter("steps", "Steps to record. Default: 20.", is_integer=True, most=MOST_STEPS),
    Parameter("seconds", "Longest time to wait for them. Default: 30.", is_integer=True, most=MOST_SECONDS),
)


@Operation(
    summary="Record the engine's next steps, for Chrome's and Perfetto's viewers; needs --profile-dir.",
    group="Debugging",
    answer="application/gzip",
    query=_PROFILE_QUERY,
    errors=(NotFound, Conflict, RequestTimeout),
)
async def profile(request: Request) -> Response:
    """Answer with a trace of the engine's next steps, as many as come in time, and save it in --profile-dir.

    Raises NotFound without that, Conflict while another profile is made, RequestTimeout if no step came, and
    Unavailable if the server shuts down before.
    """
    serving = serving_of(request)
    if serving.profile_dir is None:
        raise NotFound("Profiles are made only where the server was started with --profile-dir FOLDER.")
    asked_for = read_query(request.query_params, _PROFILE_QUERY)
    num_steps, seconds = asked_for["steps"] or 20, asked_for["seconds"] or 30
    engine, has_left = serving.engine, False
    asked = engine.profile(num_steps, seconds)
    made = asyncio.wrap_future(asked)
    try:
        while not (await asyncio.wait((made,), timeout=POLL_SECONDS))[0]:
            has_left = await request.is_disconnected()
            if has_left or not engine.is_ready:
                engine.end_profile(asked)
    finally:
        if not made.done():  # the server shuts down and cancels this request
            made.cancel()
            engine.end_profile(asked)
    got = made.result()
    if has_left:
        raise ClientDisconnect
    if got.num_steps == 0:
        if not engine.is_ready:
            raise Unavailable("The server is shutting down. Please try again.", retry_after_seconds=5)
        raise RequestTimeout(f"No step came within {seconds} seconds. Send requests while the profile is made.")
    at = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    path = serving.profile_dir / f"oaiserve-{at}-{got.num_steps}-of-{num_steps}-steps.json.gz"
    await run_in_threadpool(_save, got.recording, path)
    took_seconds = got.duration_ns / 1e9
    logger.info("A profile of %d of %d steps, in %.3f s: %s", got.num_steps, num_steps, took_seconds, path)
    headers = {"x-profile-steps": str(got.num_steps)}
    return FileResponse(path, filename=path.name, media_type="application/gzip", headers=headers)


def _save(recording: ProfileRecording, path: Path) -> None:
    """Write a trace readable only by this user, with any umask. It appears as a whole, or not at all."""
    with TemporaryDirectory(prefix=".profile-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        recording.save(written)
        written.chmod(private.FILE_MODE)
        written.replace(path)


@Operation(
    summary="What a router learns of this server: its load, and the keys of the prompts in its prefix cache.",
    group="Debugging",
    answer=Report,
)
async def report(request: Request) -> Response:
    """Answer with the report of this moment. Its `keys` are integers of 64 bits, little-endian, in base64."""
    engine = serving_of(request).engine
    made = await run_in_threadpool(engine.report)
    return json_response(Report.of(made, is_ready=engine.is_ready, is_hung=bool(engine.hang)))


def prefers_text(accept: str) -> bool:
    """Return whether an Accept header prefers text/plain to JSON, by the most specific ranges that cover them."""
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
        for ranges in (("text/plain", "text/*", "*/*"), ("application/json", "application/*", "*/*"))
    )
    return text > json
