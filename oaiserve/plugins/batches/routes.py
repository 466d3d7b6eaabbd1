"""The routes of files and batches. They make no records, since each request of a batch makes its own."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from operator import attrgetter
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oaiserve.errors import BodyTooLarge, NotFound, Overloaded, UnsupportedMedia
from oaiserve.http.refusals import STORED_BYTE_NS, STORED_NS
from oaiserve.plugins.batches.form import UploadForm
from oaiserve.plugins.batches.objects import (
    GIVEN_PURPOSES,
    WINDOW_SECONDS,
    BatchBody,
    BatchObject,
    BatchPage,
    Counts,
    FileObject,
    FilePage,
    LineErrors,
    LineReader,
)
from oaiserve.plugins.batches.state import runner_of
from oaiserve.plugins.batches.store import PIECE_BYTES, Owned
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.answer.paging import AnyPage, page_of
from oaiserve.routes.door.middleware import json_response, lasting_id
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.parameters import check_metadata
from oaiserve.routes.intake.read import read_without_engine
from oaiserve.routes.intake.receive import (
    RETRY_AFTER_SECONDS,
    TOO_MANY_BODIES,
    announced_bytes,
    check_size,
    check_type,
    pass_body,
)
from oaiserve.routes.operation import Deleted, Operation, Parameter, read_query
from oaiserve.routes.serving import MOST_FILE_BYTES

MOST_FORM_BYTES = 2**16  # bytes of a form in addition to its file, for a first check of its length
LIMIT = Parameter("limit", "How many. Default: 20.", is_integer=True, most=100)
AFTER = Parameter("after", "The id after which the page begins.")
DONE_AFTER = Parameter("after", "The number of answers that the client has.", is_integer=True, least=0)
PURPOSE = Parameter("purpose", "Only files for this.", allowed=(*GIVEN_PURPOSES, "batch_output"))


@Operation(
    summary="Upload a file, as multipart/form-data.",
    group="Batches",
    form=(
        Parameter("file", "Its content.", is_file=True),
        Parameter("purpose", "`batch` for requests, any other for images and texts.", allowed=GIVEN_PURPOSES),
    ),
    answer=FileObject,
    errors=(NotFound, BodyTooLarge, UnsupportedMedia, Overloaded),
)
async def upload(request: Request) -> Response:
    """Answer with the file. Its content is written to the disk as it arrives. While other clients' requests are open,
    many uploads of one client are held back."""
    runner = runner_of(request)
    store = runner.store
    owner = request.state.owner
    client = request.state.client
    num_announced = announced_bytes(request.headers)
    check_size(num_announced, MOST_FILE_BYTES)
    check_type(request, "multipart/form-data")
    await store.check_room(owner, max(0, num_announced - MOST_FORM_BYTES))
    too_many = Overloaded(TOO_MANY_BODIES, retry_after_seconds=RETRY_AFTER_SECONDS)
    if not store.arriving_files.take(client, 1):
        raise too_many
    adaptations = Adaptations()
    taken = 0

    def feed(data: bytes) -> None:
        nonlocal taken
        form.feed(data)
        form.check_encoding()
        if not store.arriving_bytes.take(client, form.num_bytes - taken):
            raise too_many
        taken = form.num_bytes

    try:
        with store.new_content() as content:
            form = UploadForm(request.headers["content-type"], content)
            await pass_body(request, runner.backend.received_bytes, MOST_FILE_BYTES, feed)
            form.end(adaptations)
            form.check_encoding()
            file = FileObject(
                id=f"file-{lasting_id(request)}",
                bytes=form.num_bytes,
                created_at=int(time.time()),
                filename=form.filename,
                purpose=form.purpose,
            )
            await store.add_file(owner, file, content)
            if file.bytes > PIECE_BYTES:
                await run_in_threadpool(content.close)  # This takes milliseconds for a large file.
    finally:
        store.arriving_bytes.give_back(client, taken)
        store.arriving_files.give_back(client, 1)
    if runner.backend.has_others(client):
        request.state.charged_ns = STORED_NS + STORED_BYTE_NS * file.bytes
    return json_response(file, headers=adaptations.headers())


@Operation(summary="The files.", group="Batches", answer=FilePage, query=(LIMIT, AFTER, PURPOSE))
async def list_files(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER, PURPOSE))
    newest = partial(runner_of(request).store.files, request.state.owner, query["purpose"])
    return await _page(FilePage, query, newest)


@Operation(summary="A file.", group="Batches", answer=FileObject, errors=(NotFound,))
async def retrieve_file(request: Request) -> Response:
    return json_response((await _file(request))[0])


@Operation(summary="The content of a file.", group="Batches", answer="application/octet-stream", errors=(NotFound,))
async def file_content(request: Request) -> Response:
    _, number = await _file(request)
    return StreamingResponse(runner_of(request).store.content(number), media_type="application/octet-stream")


@Operation(summary="Delete a file.", group="Batches", answer=Deleted, errors=(NotFound,))
async def delete_file(request: Request) -> Response:
    file, _ = await _file(request)
    await runner_of(request).store.delete_file(request.state.owner, file.id)
    return json_response(Deleted(file.id, "file"))


@Operation(
    summary="Begin a batch.",
    group="Batches",
    body=BatchBody,
    answer=BatchObject,
    example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
)
async def create(request: Request) -> Response:
    """Answer with the batch and its estimated cost. A file with wrong lines makes a failed batch."""
    runner = runner_of(request)
    state = request.state
    now = int(time.time())
    backend = runner.backend
    adaptations = Adaptations()
    body = await read_without_engine(request, backend.received_bytes, backend.body_limit, BatchBody, adaptations.note)
    check_metadata(body.metadata or {})
    file = await runner.store.file(state.owner, body.input_file_id)
    if file is None:
        raise NotFound(f"There is no file {show(body.input_file_id)}.", param="input_file_id")
    batch = BatchObject(
        id=f"batch_{lasting_id(request)}",
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + WINDOW_SECONDS,
        metadata=body.metadata,
    )
    owned = Owned(batch, state.owner, file[1])
    async with runner.readers:
        reader = LineReader(body.endpoint, backend.body_limit)
        async for part in runner.store.content(owned.file):
            await run_in_threadpool(reader.feed, part)
            if reader.is_done:
                break
        lines, errors = await run_in_threadpool(reader.end)
        if errors:
            batch.errors = LineErrors(errors)
            batch.end("failed", now)
            lines = []
        else:
            batch.in_progress_at = now
            batch.oaiserve = await runner.estimate(owned, lines)
        batch.request_counts = Counts(len(lines))
        await runner.store.add_batch(owned, lines)
    answer = json_response(batch, headers=adaptations.headers())
    if lines:
        runner.added()
    return answer


@Operation(summary="The batches.", group="Batches", answer=BatchPage, query=(LIMIT, AFTER))
async def list_batches(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER))
    return await _page(BatchPage, query, partial(runner_of(request).store.batches, request.state.owner))


@Operation(summary="A batch.", group="Batches", answer=BatchObject, errors=(NotFound,))
async def retrieve(request: Request) -> Response:
    return json_response(await _batch(request))


@Operation(summary="Cancel a batch.", group="Batches", answer=BatchObject, errors=(NotFound,))
async def cancel(request: Request) -> Response:
    """Answer with the ended batch. The answers up to now stay in its output."""
    await runner_of(request).cancel(Owned(await _batch(request), request.state.owner))
    return json_response(await _batch(request))


@Operation(
    summary="The answers of a batch so far, in the order in which they came. Only oaiserve has this route.",
    group="Batches",
    answer="application/jsonl",
    query=(DONE_AFTER,),
    errors=(NotFound,),
)
async def answers(request: Request) -> Response:
    after = read_query(request.query_params, (DONE_AFTER,))[DONE_AFTER.name] or 0
    content, end = await runner_of(request).store.done_lines((await _batch(request)).id, after)
    return Response(content, media_type="application/jsonl", headers={"x-after": str(end)})


def routes() -> list[Route]:
    return [
        Route(f"/v1/{path}", route, methods=[method])
        for path, method, route in (
            ("files", "POST", upload),
            ("files", "GET", list_files),
            ("files/{file_id}", "GET", retrieve_file),
            ("files/{file_id}", "DELETE", delete_file),
            ("files/{file_id}/content", "GET", file_content),
            ("batches", "POST", create),
            ("batches", "GET", list_batches),
            ("batches/{batch_id}", "GET", retrieve),
            ("batches/{batch_id}/cancel", "POST", cancel),
            ("batches/{batch_id}/answers", "GET", answers),
        )
    ]


async def _file(request: Request) -> tuple[FileObject, int]:
    file_id = request.path_params["file_id"]
    file = await runner_of(request).store.file(request.state.owner, file_id)
    if file is None:
        raise NotFound(f"There is no file {show(file_id)}: it was deleted, or is too old.", param="file_id")
    return file


async def _batch(request: Request) -> BatchObject:
    batch_id = request.path_params["batch_id"]
    batch = await runner_of(request).store.batch(request.state.owner, batch_id)
    if batch is None or batch.is_of_messages:
        raise NotFound(f"There is no batch {show(batch_id)}.", param="batch_id")
    return batch


async def _page(
    kind: type[AnyPage], query: dict[str, Any], newest: Callable[[int, str | None], Awaitable[list[Any]]]
) -> Response:
    """Answer with a page of the result of `newest`, which takes a limit and the id after which to begin."""
    limit = query["limit"] or 20
    after = query["after"]
    try:
        items = await newest(limit + 1, after)
    except NotFound:
        raise invalid("after", f"there is no {show(after)} here") from None
    return json_response(page_of(kind, items, attrgetter("id"), limit, None))
