"""/debug/requests, the accounts of the last requests that ended, and /debug/profile, a trace of the next engine steps.

Neither holds text of prompts or answers.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response

from oaiserve import private
from oaiserve.errors import NotFound, RequestTimeout, Unavailable
from oaiserve.record import Outcome, Recording
from oaiserve.routes.middleware import json_response
from oaiserve.routes.protocol import invalid, show
from oaiserve.routes.serving import serving_of
from oaiserve.routes.waterfall import page
from oaiserve.times import PHASES

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2  # how often a profile checks that its client is still connected
MOST_STEPS, MOST_SECONDS = 1000, 600


async def recent_requests(request: Request) -> Response:
    """Answer with the last requests, newest first. The query may have `slowest` (the phase by which they are sorted
    instead, longest first), `outcome`, `id` (the beginning of the request id) and `limit`. Raises InvalidRequest."""
    query = request.query_params
    _check_names(query, "slowest", "outcome", "id", "limit")
    slowest = _one_of("slowest", query.get("slowest"), PHASES)
    outcome = _one_of("outcome", query.get("outcome"), tuple(Outcome))
    id_prefix, limit = query.get("id", ""), _integer("limit", query.get("limit"))
    recent = serving_of(request).recent

    def render() -> Response:
        entries = recent.list(slowest=slowest, outcome=outcome, id_prefix=id_prefix, limit=limit)
        return json_response({"requests": entries})

    return await run_in_threadpool(render)


async def recent_request(request: Request) -> Response:
    """Answer with the request that has this id in its header x-request-id: as text if the client prefers text or sends
    `format=text`, or else as JSON. Raises NotFound if the request is not among the last."""
    _check_names(request.query_params, "format")
    asked = _one_of("format", request.query_params.get("format"), ("json", "text"))
    as_text = asked == "text" if asked is not None else prefers_text(request.headers.get("accept", ""))
    request_id = request.path_params["request_id"]
    entry = await run_in_threadpool(serving_of(request).recent.get, request_id)
    if entry is None:
        raise NotFound(f"No request '{request_id[:128]}' is among the last that ended (--recent-requests).")
    return PlainTextResponse(page(entry)) if as_text else json_response(entry)


async def profile(request: Request) -> Response:
    """Answer with a trace of the engine's next `steps` steps, or of as many as come within `seconds`, and save it in
    --profile-dir.

    Raises NotFound without --profile-dir, Conflict while another profile is made, RequestTimeout if no step came, and
    Unavailable if the server shuts down before.
    """
    serving, query = serving_of(request), request.query_params
    if serving.profile_dir is None:
        raise NotFound("Profiles are made only where the server was started with --profile-dir FOLDER.")
    _check_names(query, "steps", "seconds")
    num_steps = _integer("steps", query.get("steps"), MOST_STEPS) or 20
    seconds = _integer("seconds", query.get("seconds"), MOST_SECONDS) or 30
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


def _save(recording: Recording, path: Path) -> None:
    """Write a trace that only this user can read, whatever the umask. It appears as a whole, or not at all."""
    with TemporaryDirectory(prefix=".profile-", dir=path.parent) as folder:
        written = Path(folder) / path.name
        recording.save(written)
        written.chmod(private.FILE_MODE)
        written.replace(path)


async def closed(request: Request) -> Response:
    """Raise NotFound with the reason why this server has neither these routes nor the live page."""
    raise NotFound(
        f"{request.scope['path']} shows other people's requests, so it is there only with an --api-key, or where "
        "--host is this machine alone, as in 127.0.0.1."
    )


def _check_names(query: QueryParams, *known: str) -> None:
    for name in query:
        if name not in known:
            raise invalid(name[:80], f"this route takes {', '.join(known)}")


def _one_of(name: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
    if value is not None and value not in allowed:
        raise invalid(name, f"must be one of {', '.join(allowed)}, got {show(value)}")
    return value


def _integer(name: str, value: str | None, most: int | None = None) -> int | None:
    if value is None:
        return None
    is_integer = value.isascii() and value.isdecimal() and len(value) <= 9
    if not is_integer or int(value) < 1 or (most is not None and int(value) > most):
        allowed = ">= 1" if most is None else f"from 1 to {most}"
        raise invalid(name, f"must be an integer {allowed}, got {show(value)}")
    return int(value)


def prefers_text(accept: str) -> bool:
    """Return whether an Accept header prefers text/plain to JSON."""
    return _quality(accept, "text/plain") > _quality(accept, "application/json")


def _quality(accept: str, media_type: str) -> float:
    """Return the quality of the most specific range that covers the media type, or 0 if none does."""
    qualities: dict[str, float] = {}
    for item in accept.lower().split(","):
        media_range, *parameters = (part.strip() for part in item.split(";"))
        given = [parameter[2:] for parameter in parameters if parameter.startswith("q=")]
        try:
            qualities[media_range] = float(given[0]) if given else 1.0
        except ValueError:
            continue  # a range with a malformed quality is ignored
    ranges = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
    return next((qualities[media_range] for media_range in ranges if media_range in qualities), 0.0)
