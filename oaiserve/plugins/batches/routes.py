"""The routes of files and batches. They make no records, since each request of a batch makes its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, wraps
from operator import attrgetter
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oaiserve.errors import BodyTooLarge, NotFound, Overloaded, UnsupportedMedia
from oaiserve.plugins.batches import message_files
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
from oaiserve.plugins.batches.store import Owned
from oaiserve.plugins.batches.uploads import file_in_path, store_upload
from oaiserve.routes.adaptations import Adaptations
from oaiserve.routes.answer.paging import AnyPage, page_of
from oaiserve.routes.door.middleware import is_of_anthropic, json_response, lasting_id
from oaiserve.routes.intake.invalid import invalid, show
from oaiserve.routes.intake.parameters import check_metadata
from oaiserve.routes.intake.read import read_without_engine
from oaiserve.routes.operation import Deleted, Operation, Parameter, read_query

LIMIT = Parameter("limit", "How many. Default: 20.", is_integer=True, most=100)
AFTER = Parameter("after", "The id after which the page begins.")
DONE_AFTER = Parameter("after", "The number of answers that the client has.", is_integer=True, least=0)
PURPOSE = Parameter("purpose", "Only files for this.", allowed=(*GIVEN_PURPOSES, "batch_output"))
Function = Callable[[Request], Coroutine[Any, Any, Response]]


@Operation(
    summary="Upload a file, as multipart/form-data.",
    group="Batches",
    form=(
        Parameter("file", "Its content.", is_file=True),
        Parameter(
            "purpose",
            "`batch` for requests, any other for images and texts. With anthropic-version it may be left out.",
            allowed=GIVEN_PURPOSES,
        ),
    ),
    answer=FileObject,
    answer_of_anthropic=message_files.FileMetadata,
    errors=(NotFound, BodyTooLarge, UnsupportedMedia, Overloaded),
)
async def upload(request: Request) -> Response:
    adaptations = Adaptations()
    file = await store_upload(request, adaptations)
    return json_response(file, headers=adaptations.headers())


@Operation(
    summary="The files.",
    group="Batches",
    answer=FilePage,
    answer_of_anthropic=message_files.FileMetadataPage,
    query=(LIMIT, AFTER, PURPOSE, *message_files.QUERY),
)
async def list_files(request: Request) -> Response:
    query = read_query(request.query_params, (LIMIT, AFTER, PURPOSE))
    newest = partial(runner_of(request).store.files, request.state.owner, query["purpose"])
    return await _page(FilePage, query, newest)


@Operation(
    summary="A file.",
    group="Batches",
    answer=FileObject,
    answer_of_anthropic=message_files.FileMetadata,
    errors=(NotFound,),
)
async def retrieve_file(request: Request) -> Response:
    return json_response((await file_in_path(request))[0])


@Operation(summary="The content of a file.", group="Batches", answer="application/octet-stream", errors=(NotFound,))
async def file_content(request: Request) -> Response:
    _, number = await file_in_path(request)
    return StreamingResponse(runner_of(request).store.content(number), media_type="application/octet-stream")


@Operation(
    summary="Delete a file.",
    group="Batches",
    answer=Deleted,
    answer_of_anthropic=message_files.DeletedFile,
    errors=(NotFound,),
)
async def delete_file(request: Request) -> Response:
    file, _ = await file_in_path(request)
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
    now = runner.backend.runtime.unix_ns() // 10**9
    bodies = runner.backend.bodies
    adaptations = Adaptations()
    body = await read_without_engine(request, bodies, BatchBody, adaptations.note)
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
        reader = LineReader(body.endpoint, bodies.limit_bytes)
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


def _in_either_form(of_openai: Function, of_anthropic: Function) -> Function:
    """Return the function of a route that answers clients of both APIs, each in its form."""

    @wraps(of_openai)
    async def answer(request: Request) -> Response:
        return await (of_anthropic if is_of_anthropic(request.scope) else of_openai)(request)

    return answer


def routes() -> list[Route]:
    return [
        Route(f"/v1/{path}", route, methods=[method])
        for path, method, route in (
            ("files", "POST", _in_either_form(upload, message_files.upload)),
            ("files", "GET", _in_either_form(list_files, message_files.list_files)),
            ("files/{file_id}", "GET", _in_either_form(retrieve_file, message_files.retrieve_file)),
            ("files/{file_id}", "DELETE", _in_either_form(delete_file, message_files.delete_file)),
            ("files/{file_id}/content", "GET", file_content),
            ("batches", "POST", create),
            ("batches", "GET", list_batches),
            ("batches/{batch_id}", "GET", retrieve),
            ("batches/{batch_id}/cancel", "POST", cancel),
            ("batches/{batch_id}/answers", "GET", answers),
        )
    ]


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
