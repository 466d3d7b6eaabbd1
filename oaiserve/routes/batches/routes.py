"""The routes of files and batches. They make no records: each request of a batch makes its own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from operator import attrgetter
from typing import Any, Literal

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from oaiserve.errors import BodyTooLarge, InvalidRequest, NotFound, Overloaded, UnsupportedMedia
from oaiserve.routes.batches.form import read_form
from oaiserve.routes.batches.objects import (
    WINDOW_SECONDS,
    BatchBody,
    BatchObject,
    BatchPage,
    Counts,
    FileObject,
    FilePage,
    LineErrors,
    is_utf16,
    lines_of,
)
from oaiserve.routes.batches.runner import BatchRunner
from oaiserve.routes.batches.store import Owned
from oaiserve.routes.body import RETRY_AFTER_SECONDS, TOO_MANY_BODIES, read_body, read_parsed
from oaiserve.routes.invalid import invalid, show
from oaiserve.routes.middleware import json_response, lasting_id
from oaiserve.routes.operation import Deleted, Operation, Parameter, read_query
from oaiserve.routes.pages import AnyPage, page_of
from oaiserve.routes.parameters import check_metadata
from oaiserve.routes.serving import serving_of

MOST_FILE_BYTES = 64 * 2**20
PIECE_BYTES = 64 * 1024
MOST_PURPOSE_BYTES = 200
LIMIT = Parameter("limit", "How many. Default: 20.", is_integer=True, most=100)
AFTER = Parameter("after", "The id behind which to begin.")
DONE_AFTER = Parameter("after", "How many answers the client has.", is_integer=True, least=0)
GIVEN_PURPOSES: tuple[Literal["batch", "vision", "user_data"], ...] = ("batch", "vision", "user_data")
PURPOSE = Parameter("purpose", "Only files for this.", allowed=(*GIVEN_PURPOSES, "batch_output"))


@Operation(
    summary="Upload a file, as multipart/form-data with `file`, and `purpose`: `batch` for requests, or `vision` or "
    "`user_data` for images.",
    group="Batches",
    answer=FileObject,
    errors=(NotFound, BodyTooLarge, UnsupportedMedia, Overloaded),
)
async def upload(request: Request) -> Response:
    store = _runner(request).store
    received = serving_of(request).received_bytes
    body = await read_body(request, serving_of(request), "multipart/form-data", MOST_FILE_BYTES)
    num_bytes = len(body)
    if not received.take(request.state.client, num_bytes):  # until it is stored
        raise Overloaded(TOO_MANY_BODIES, retry_after_seconds=RETRY_AFTER_SECONDS)
    try:
        purpose, filename, content = await run_in_threadpool(_parts, request.headers["content-type"], body)
        known = next((one for one in GIVEN_PURPOSES if one == purpose), None)
        if known is None:
            raise invalid("purpose", f"must be 'batch', 'vision' or 'user_data', got {show(purpose)}")
        if known == "batch" and is_utf16(content):
            raise invalid("file", "must be in UTF-8 for a batch, but is in UTF-16 or UTF-32")
        now = int(time.time())
        file_id = f"file-{lasting_id(request)}"
        file = FileObject(id=file_id, bytes=len(content), created_at=now, filename=filename, purpose=known)
        await store.add_file(request.state.owner, file, content)
    finally:
        received.give_back(request.state.client, num_bytes)
    return json_response(file)


def _parts(content_type: str, body: bytearray) -> tuple[str, str, bytes | bytearray]:
    """Return the purpose, the name and the content of a file in a form, which is taken out of the body."""
    fields = read_form(content_type, body)
    if "file" not in fields or "purpose" not in fields:
        raise InvalidRequest("The form must have the fields 'file' and 'purpose'.", param="file")
    purpose = fields["purpose"].content(body, MOST_PURPOSE_BYTES)
    file = fields["file"]
    return purpose.decode(errors="replace").strip(), file.filename or "file", file.take_content(body)


@Operation(summary="The files.", group="Batches", answer=FilePage, query=(LIMIT, AFTER, PURPOSE))
async def list_files(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER, PURPOSE))
    files = await _runner(request).store.files(request.state.owner)
    return _page(FilePage, query, [one for one in files if query["purpose"] in (None, one.purpose)])


@Operation(summary="A file.", group="Batches", answer=FileObject, errors=(NotFound,))
async def retrieve_file(request: Request) -> Response:
    return json_response(await _file(request))


@Operation(summary="The content of a file.", group="Batches", answer="application/octet-stream", errors=(NotFound,))
async def file_content(request: Request) -> Response:
    file, store, owner = await _file(request), _runner(request).store, request.state.owner

    async def pieces() -> AsyncIterator[bytes]:
        after: int | None = 0
        while after is not None and (found := await store.content(owner, file.id, after)) is not None:
            part, after = found
            for start in range(0, len(part), PIECE_BYTES):
                yield part[start : start + PIECE_BYTES]

    return StreamingResponse(pieces(), media_type="application/octet-stream")


@Operation(summary="Delete a file.", group="Batches", answer=Deleted, errors=(NotFound,))
async def delete_file(request: Request) -> Response:
    file = await _file(request)
    await _runner(request).store.delete_file(request.state.owner, file.id)
    return json_response(Deleted(file.id, "file"))


@Operation(
    summary="Begin a batch.",
    group="Batches",
    body=BatchBody,
    answer=BatchObject,
    example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)
async def create(request: Request) -> Response:
    """Answer with the batch and its estimated cost; a file with wrong lines makes one that has failed."""
    runner, state, now = _runner(request), request.state, int(time.time())
    body, _ = await read_parsed(request, BatchBody)
    check_metadata(body.metadata or {})
    found = await runner.store.content(state.owner, body.input_file_id)
    if found is None:
        raise NotFound(f"There is no file {show(body.input_file_id)}.", param="input_file_id")
    lines, errors = await run_in_threadpool(lines_of, found[0], body.endpoint)
    batch = BatchObject(
        id=f"batch_{lasting_id(request)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        metadata=body.metadata,
        request_counts=Counts(len(lines)),
    )
    owned = Owned(batch, state.owner)
    if errors:
        batch.errors = LineErrors(errors)
        batch.end("failed", now)
        await runner.store.add_batch(owned, [])
        return json_response(batch)
    batch.in_progress_at, batch.oaiserve = now, await runner.estimate(owned, lines)
    await runner.store.add_batch(owned, lines)
    answer = json_response(batch)
    runner.added()
    return answer


@Operation(summary="The batches.", group="Batches", answer=BatchPage, query=(LIMIT, AFTER))
async def list_batches(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER))
    return _page(BatchPage, query, await _runner(request).store.batches(request.state.owner))


@Operation(summary="A batch.", group="Batches", answer=BatchObject, errors=(NotFound,))
async def retrieve(request: Request) -> Response:
    return json_response(await _batch(request))


@Operation(summary="Cancel a batch.", group="Batches", answer=BatchObject, errors=(NotFound,))
async def cancel(request: Request) -> Response:
    """Answer with the batch as it has ended. What was answered before stays in its output."""
    await _runner(request).cancel(Owned(await _batch(request), request.state.owner))
    return json_response(await _batch(request))


@Operation(
    summary="The answers of a batch so far, in the order in which they came: oaiserve's own.",
    group="Batches",
    answer="application/jsonl",
    query=(DONE_AFTER,),
    errors=(NotFound,),
)
async def answers(request: Request) -> Response:
    after = read_query(request.query_params, (DONE_AFTER,))[DONE_AFTER.name] or 0
    content, end = await _runner(request).store.done_lines((await _batch(request)).id, after)
    return Response(content, media_type="application/jsonl", headers={"x-after": str(end)})


def _runner(request: Request) -> BatchRunner:
    runner: BatchRunner | None = request.app.state.batches
    if runner is None:
        stores = serving_of(request).config.server.stores_responses
        reason = "--front-ends and without --response-store" if stores else "--response-store-number 0"
        raise InvalidRequest(f"This server has no files and no batches, as it runs with {reason}.")
    return runner


async def _file(request: Request) -> FileObject:
    file_id = request.path_params["file_id"]
    for file in await _runner(request).store.files(request.state.owner, file_id):
        return file
    raise NotFound(f"There is no file {show(file_id)}: it was deleted, or is too old.", param="file_id")


async def _batch(request: Request) -> BatchObject:
    batch_id = request.path_params["batch_id"]
    for batch in await _runner(request).store.batches(request.state.owner, batch_id):
        return batch
    raise NotFound(f"There is no batch {show(batch_id)}.", param="batch_id")


def _page(kind: type[AnyPage], query: dict[str, Any], items: list[Any]) -> Response:
    return json_response(page_of(kind, items, attrgetter("id"), query["limit"] or 20, query["after"]))
